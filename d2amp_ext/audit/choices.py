"""Choices of a training step that are held: proposals, matches and samples are those of the fp32 run in both runs.

A box that moves by a thousandth can be the one that is not sampled any more, and then the losses are those of other
boxes: their difference would say nothing about the precision. What a box that moves does in the end, detections and AP
say, where nothing is held.
"""

import contextlib

import torch
from detectron2.structures import Instances

from ..numerics.island import clean_name


class Choices:
    """What modules gave that is no number to compute with: `Instances`, and tensors of integers and booleans."""

    def __init__(self):
        self._kept = {}

    @contextlib.contextmanager
    def recorded(self, model):
        """Around a forward pass whose choices are to be held later."""
        with self._hooked(model, self._record):
            yield

    @contextlib.contextmanager
    def held(self, model):
        """Around a forward pass that makes the recorded choices."""
        with self._hooked(model, self._replace):
            yield

    @contextlib.contextmanager
    def _hooked(self, model, act):
        calls, handles = {}, []

        def hook(name):
            def after(module, args, output):
                number = calls[name] = calls.get(name, 0) + 1
                return act((name, number), output)

            return after

        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_hook(hook(clean_name(name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, key, output):
        if _has_choice(output):
            self._kept[key] = _choices(output)

    def _replace(self, key, output):
        return _exchanged(output, self._kept[key]) if key in self._kept else None


def _is_choice(value):
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, Instances)


def _has_choice(value):
    if isinstance(value, dict):
        return any(map(_has_choice, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_choice, value))
    return _is_choice(value)


def _choices(value):
    """The same nesting, with None for what is no choice."""
    if isinstance(value, dict):
        return {name: _choices(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_choices(item) for item in value]
    if isinstance(value, Instances):
        return _copy(value)
    return value.clone() if _is_choice(value) else None


def _copy(instances):
    fields = instances.get_fields().items()
    detached = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in fields}
    return Instances(instances.image_size, **detached)


def _exchanged(value, kept):
    if isinstance(value, dict) and isinstance(kept, dict):
        return type(value)((name, _exchanged(item, kept.get(name))) for name, item in value.items())
    if isinstance(value, (list, tuple)) and isinstance(kept, list) and len(kept) == len(value):
        items = [_exchanged(*pair) for pair in zip(value, kept)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if kept is None or not _is_choice(value):
        return value
    return _copy(kept) if isinstance(kept, Instances) else kept
