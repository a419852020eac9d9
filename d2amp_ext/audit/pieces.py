"""What of a model is measured: modules, and the methods that the shield knows by name; and values apart from the run."""

import contextlib
import copy
import logging

import torch

from ..numerics.island import clean_name, upcast
from ..numerics.shield import methods_of

logger = logging.getLogger(__name__)

UNKNOWN = object()  # in place of a value of which there is no copy


def pieces(model):
    """((qualified name, method or ""), object, attribute) of everything that is measured."""
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        name = clean_name(name)
        yield (name, ""), module, "forward"
        plain = [(a, value) for a, value in vars(module).items() if not isinstance(value, torch.nn.Module)]
        for prefix, value in [("", module), *((f"{attribute}.", value) for attribute, value in plain)]:
            for method in methods_of(value):
                is_one = callable(getattr(value, method, None)) and not isinstance(getattr(value, method), torch.nn.Module)
                if is_one and method != "forward" and (id(value), method) not in seen:
                    seen.add((id(value), method))
                    yield (name, prefix + method), value, method


@contextlib.contextmanager
def exchanged(owner, attribute, value):
    """An attribute of one object, not of its class, for a while."""
    before = vars(owner).get(attribute)
    vars(owner)[attribute] = value
    try:
        yield
    finally:
        if before is None:
            vars(owner).pop(attribute, None)
        else:
            vars(owner)[attribute] = before


def copied(value):
    """A copy that nobody changes in place; UNKNOWN where there is none to be had."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # an open file, a tensor with a graph ...
        logger.debug(f"Values were not recorded: {type(error).__name__}: {error}")
        return UNKNOWN


def lifted(value):
    """An fp32 copy."""
    return upcast(copied(value))
