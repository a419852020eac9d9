"""How far an update moves the weights."""

import math

import torch
from detectron2.engine import HookBase

from .. import _compat


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
            self._before = {name: (ps, [p.clone() for p in ps]) for name, ps in with_gradient.items() if ps}

    @torch.no_grad()
    def after_step(self):
        before, self._before = self._before, {}
        if not before or not self._readout.is_due(self.trainer):
            return
        tensors, sizes = [], {}
        for stage, (parameters, copies) in before.items():
            torch._foreach_sub_(copies, parameters)
            norms = _compat.gradient_norms(copies) + _compat.gradient_norms(parameters)
            tensors.append(torch.stack([norm.to(norms[0].device) for norm in norms]))
            sizes[stage] = len(parameters)
        self._readout.add(tensors, lambda values: _finish(sizes, values))


def _finish(sizes, values):
    scalars, position, updates, weights = {}, 0, [], []
    for stage, size in sizes.items():
        update, weight = values[position : position + size], values[position + size : position + 2 * size]
        scalars[f"precision/update_to_weight_log2/{stage}"] = _ratio(update, weight)
        updates += update
        weights += weight
        position += 2 * size
    return {"precision/update_to_weight_log2": _ratio(updates, weights), **scalars}


def _ratio(updates, weights):
    """log2 of the ratio; NaN, which is not written, for a skipped update and for weights that are all zero."""
    update, weight = math.hypot(*updates), math.hypot(*weights)
    return math.log2(update / weight) if update > 0 and weight > 0 else math.nan
