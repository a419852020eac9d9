"""How far an update moves the weights."""

import math

import torch
from detectron2.engine import HookBase


class UpdateScalars(HookBase):
    """log2 of |update| / |weights|, per stage and over all. Weights are copied in a step that is read, and only there."""

    def __init__(self, readout, stages):
        """
        Args:
            readout (Readout):
            stages (dict[str, list[Parameter]]): as `group_parameters` gives them.
        """
        self._readout = readout
        self._stages = stages
        self._before = {}

    @torch.no_grad()
    def after_backward(self):
        if self._readout.is_due(self.trainer):
            with_gradient = {name: [p for p in ps if p.grad is not None] for name, ps in self._stages.items()}
            self._before = {name: (ps, _flat(ps)) for name, ps in with_gradient.items() if ps}

    @torch.no_grad()
    def after_step(self):
        before, self._before = self._before, {}
        if not before or not self._readout.is_due(self.trainer):
            return
        norms = []
        for parameters, old in before.values():
            new = _flat(parameters)
            norms += [torch.linalg.vector_norm(old.sub_(new)), torch.linalg.vector_norm(new)]
        self._readout.add(norms, lambda values: _finish(list(before), values))


def _flat(parameters):
    """All values of parameters, which may be of several types and on several devices, as one vector of their own."""
    device = parameters[0].device
    return torch.cat([p.to(device).reshape(-1) for p in parameters])


def _finish(stages, values):
    updates, weights = values[::2], values[1::2]
    scalars = {"precision/update_to_weight_log2": _ratio(math.hypot(*updates), math.hypot(*weights))}
    for stage, update, weight in zip(stages, updates, weights):
        scalars[f"precision/update_to_weight_log2/{stage}"] = _ratio(update, weight)
    return scalars


def _ratio(update, weight):
    """log2 of the ratio; NaN, which is not written, for a skipped update and for weights that are all zero."""
    return math.log2(update / weight) if math.inf > update > 0 and weight > 0 else math.nan
