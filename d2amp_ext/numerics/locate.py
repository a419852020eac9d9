"""The locator: where the values of a step stopped being finite, from a replay of its batches."""

import logging

import numpy as np
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from torch.nn.modules.batchnorm import _NormBase

from ..step import add_up, by_name
from .apart import apart, shared_statistics
from .finding import Finding
from .island import clean_name, unwrapped
from .watch import Watch, extent

logger = logging.getLogger(__name__)


def locate(model, batches, policy, *, scale=1.0, random=None, iteration=0):
    """Replays the batches of a step and says where values stopped being finite.

    Changes nothing: parameters, gradients, buffers, attributes of modules, random states and the EventStorage are as
    they were. Waits for no other rank. The model must be as it was before the step.

    Args:
        model (nn.Module): in training mode; in DistributedDataParallel or torch.compile or not.
        batches (list): what the model takes, one item a micro-batch.
        policy (PrecisionPolicy): resolved. The model is expected to be protected as it says.
        scale (float): of the loss.
        random (dict or None): the random state before the step, as `random_state.capture` gives it.
        iteration (int): of the step.

    Returns:
        Finding
    """
    model = unwrapped(model)
    inputs, parameters = bad_inputs(batches), bad_parameters(model)
    note = shared_statistics(model)
    sums, seen, details = {}, 0, {}
    with policy.float32_switches(), apart(model, random, iteration):
        for number, batch in enumerate(batches, 1):
            losses, details = _replay(model, batch, policy, scale / len(batches))
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value
            seen = number
            if details:
                details["micro_batch"] = number
                break
    losses = {name: value / seen for name, value in sums.items()}
    return Finding(policy.precision, losses=losses, inputs=inputs, parameters=parameters, note=note, **details)


def _replay(model, batch, policy, scale):
    """One micro-batch: (losses as floats, what was not finite as fields of a Finding)."""
    watch = Watch(model)
    try:
        with watch.watching(), policy.autocast():
            losses = by_name(model(batch))
    except FloatingPointError as error:
        return {}, {"forward": watch.forward, "failure": str(error) or type(error).__name__}
    try:
        return _judge(losses, watch, scale)
    finally:
        watch.forget()


def _judge(losses, watch, scale):
    values = {name: loss.detach().float().item() for name, loss in losses.items()}
    bad = tuple(name for name, value in values.items() if not np.isfinite(value))
    total = add_up(losses)
    if bad or not np.isfinite(total.item()):
        return values, {"forward": watch.forward, "terms": bad or tuple(values)}
    if not total.requires_grad:
        return values, {}
    total = total * scale
    watch.follow(total)
    total.backward(retain_graph=True)
    place = watch.backward
    if place is None:
        return values, {}
    return values, {"backward": place, "terms": _terms(losses, watch, scale)}


def _terms(losses, watch, scale):
    """The losses whose own gradient is not finite; none where only their sum overflows, or one cannot be asked alone."""
    terms = []
    for name, loss in losses.items():
        if not loss.requires_grad:
            continue
        watch.backward = None
        try:
            (loss.float() * scale).backward(retain_graph=True)
        except RuntimeError as error:  # of a graph that allows one pass only
            logger.debug(f"The gradient of {name} alone cannot be taken: {error}")
            return ()
        if watch.backward is not None:
            terms.append(name)
    return tuple(terms)


def bad_parameters(model):
    """The names of parameters, and of buffers of normalization layers, that are not finite."""
    norms = [clean_name(name) for name, module in model.named_modules() if isinstance(module, (_NormBase, FrozenBatchNorm2d))]
    tensors = [(clean_name(name), tensor) for name, tensor in model.named_parameters()]
    for name, tensor in model.named_buffers():
        if clean_name(name).rpartition(".")[0] in norms:
            tensors.append((clean_name(name), tensor))
    return tuple(name for name, tensor in tensors if extent(tensor).kind)


def bad_inputs(batches):
    """Inputs that are not finite, as "image file: field"; "sample 2 of micro-batch 1" for samples without a file name."""
    found = []
    for number, batch in enumerate(batches, 1):
        for place, sample in enumerate(batch if isinstance(batch, (list, tuple)) else [batch], 1):
            file = sample.get("file_name") if isinstance(sample, dict) else None
            label = str(file or f"sample {place} of micro-batch {number}")
            found += [f"{label}: {path}" if path else label for path, value in _fields(sample, "") if _is_bad(value)]
    return tuple(found)


def _fields(value, path):
    """Every tensor, array and number in nested values, with where it is."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, float)):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _fields(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _fields(item, f"{path}[{number}]")
    elif isinstance(value, Instances):
        yield from _fields(value.get_fields(), path)
    elif isinstance(value, PolygonMasks):
        yield from _fields(value.polygons, path)
    elif isinstance(value, (Boxes, RotatedBoxes, BitMasks, Keypoints)):
        yield path, value.tensor


def _is_bad(value):
    if isinstance(value, torch.Tensor):
        return extent(value).kind is not None
    return np.asarray(value).dtype.kind in "fc" and not np.isfinite(value).all()
