"""Parts of a model that stay in fp32: tensors are cast up on the way in, and autocast is off inside."""

import contextlib
import functools
import inspect

import torch
from detectron2.structures import Boxes, ImageList, Instances, RotatedBoxes
from torch import nn

_LOW = (torch.float16, torch.bfloat16)


def fp32_island(target):
    """Decorator: a function, a method or a module class that stays in fp32.

    16-bit tensors in its arguments (also inside lists, tuples, dicts, `Instances`, `Boxes` and `ImageList`) arrive as
    fp32, and autocast is off while it runs. Outputs are left as they come. Without autocast and without 16-bit tensors
    nothing changes. Of a class, `forward` is what stays in fp32.

        @fp32_island
        def matching_cost(logits, boxes, targets): ...

    Returns:
        what it was given: a wrapped function, or the class itself.
    """
    if inspect.isclass(target):
        target.forward = fp32_island(target.forward)
        return target

    @functools.wraps(target)
    def in_fp32(*args, **kwargs):
        device_type = active_autocast(args, kwargs)
        if device_type is None and not has_low(args) and not has_low(kwargs):
            return target(*args, **kwargs)
        with autocast_off(device_type):
            return target(*upcast(args), **upcast(kwargs))

    return in_fp32


def active_autocast(*values):
    """The device type whose autocast is on: that of a tensor in `values`, or of a GPU or CPU; None when it is off."""
    device = device_of(values)
    types = [device.type] if device is not None else ["cuda", "cpu"]
    return next((kind for kind in types if torch.is_autocast_enabled(kind)), None)


def autocast_off(device_type):
    """A context without autocast on a type of device; one that does nothing for None."""
    return contextlib.nullcontext() if device_type is None else torch.autocast(device_type, enabled=False)


def device_of(value):
    """The device of the first tensor in nested values, or None."""
    return next((tensor.device for tensor in tensors_in(value)), None)


def has_low(value):
    """Whether there is a 16-bit float tensor in nested values."""
    return any(tensor.dtype in _LOW for tensor in tensors_in(value))


def tensors_in(value):
    """Every tensor in nested lists, tuples, dicts, `Instances`, `ImageList` and boxes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Instances):
        yield from tensors_in(value.get_fields())
    elif isinstance(getattr(value, "tensor", None), torch.Tensor):  # Boxes, ImageList, Keypoints, masks ...
        yield value.tensor


def upcast(value):
    """`value` with its 16-bit float tensors as fp32, in new containers. What has none of them is returned as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW else value
    if not has_low(value):
        return value
    if isinstance(value, dict):
        return type(value)((name, upcast(item)) for name, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(upcast, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(upcast, value))
    if isinstance(value, Instances):
        return Instances(value.image_size, **upcast(value.get_fields()))
    if isinstance(value, ImageList):
        return ImageList(value.tensor.float(), value.image_sizes)
    if type(value) in (Boxes, RotatedBoxes):
        return type(value)(value.tensor.float())
    return value


@functools.lru_cache(maxsize=None)
def island_class(cls):
    """A subclass of a module class whose `forward` is an fp32 island. Same name; copies and pickles well."""

    def forward(self, *args, **kwargs):
        return fp32_island(functools.partial(cls.forward, self))(*args, **kwargs)

    return subclass_like(cls, {"forward": forward, "is_island": True}, island_class)


def subclass_like(cls, methods, make):
    """A subclass that passes for its base by name.

    Args:
        cls (type):
        methods (dict[str, callable]): what it overrides.
        make (callable): makes it again from `cls`, for copies and pickles of instances.
    """

    def __reduce_ex__(self, protocol):
        return _rebuild, (make, cls), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type(cls)(cls.__name__, (cls,), {**names, "__reduce_ex__": __reduce_ex__, **methods})
    made.stands_for = getattr(cls, "stands_for", cls)
    return made


def _rebuild(make, cls):
    made = make(cls)
    return made.__new__(made)


def stock_class(value):
    """The class of an object, seen through `subclass_like`."""
    return getattr(type(value), "stands_for", type(value))


def unwrapped(model):
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return model
        model = inner


def clean_name(name):
    """A qualified module name without what activation checkpointing, torch.compile and DDP put into it."""
    hidden = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in hidden)
