"""A replay leaves no trace: what a forward and a backward pass change is put back, and other ranks are not waited for."""

import contextlib
from collections import OrderedDict, deque

import torch
import torch.distributed as dist
from detectron2.utils.events import EventStorage
from torch import nn

from .. import random_state

_CONTAINERS = (dict, OrderedDict, list, set, deque)  # whose contents a module may change in place


@contextlib.contextmanager
def apart(model, random=None, iteration=0):
    """Around forward and backward passes that must not be seen.

    Parameters are exchanged for leaves of their own that share the values, so that neither gradients nor hooks of
    DistributedDataParallel notice; buffers for copies. Attributes of modules, lists and dicts among them, random states
    and gradients are put back. What the model logs goes to an EventStorage that is thrown away.

    Args:
        model (nn.Module): not in DistributedDataParallel.
        random (dict or None): a state of `random_state.capture` to start from.
        iteration (int): what the model finds in the EventStorage.
    """
    now = random_state.snapshot()
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(module, dict(vars(module))) for module in modules]
    contents = [(value, value.copy()) for _, kept in attributes for value in kept.values() if type(value) in _CONTAINERS]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    stand_ins = {}
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        for module in modules:
            _exchange(module._parameters, stand_ins, _leaf)
            _exchange(module._buffers, stand_ins, lambda buffer: buffer.detach().clone())
        if random is not None:
            random_state.restore(random)
        with EventStorage(iteration), _alone(), _eager(), torch.enable_grad():
            yield
    finally:
        for module, kept in attributes:
            vars(module).clear()
            vars(module).update(kept)
        for live, kept in contents:  # parameters and buffers among them
            live.clear()
            (live.extend if isinstance(live, (list, deque)) else live.update)(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random_state.restore(random_state.plain(now))


def _exchange(tensors, stand_ins, make):
    for name, tensor in tensors.items():
        if tensor is not None:
            if id(tensor) not in stand_ins:  # tied weights stay tied
                stand_ins[id(tensor)] = make(tensor)
            tensors[name] = stand_ins[id(tensor)]


def _leaf(parameter):
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(_forget)  # a gradient is looked at on its way, and takes no memory
    return leaf


def _forget(parameter):
    parameter.grad = None


@contextlib.contextmanager
def _alone():
    """To everybody who asks, there is one process: no rank waits for another one that is not replaying."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    stock = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = stock


def _eager():
    """Without torch.compile inside, where torch can turn it off."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return set_stance("force_eager") if set_stance else contextlib.nullcontext()


def shared_statistics(model):
    """A note if the model has batch norms whose statistics are those of all ranks, which a replay does not have."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    synced = any(isinstance(m, nn.SyncBatchNorm) or "SyncBatchNorm" in type(m).__name__ for m in model.modules())
    return "SyncBatchNorm had the statistics of this rank alone in the replay" if synced else ""
