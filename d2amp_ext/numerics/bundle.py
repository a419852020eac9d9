"""Bundles: a step that was not finite as one file, from which `d2amp replay` makes it again on another machine.

A file holds plain types and tensors only, so that `torch.load(weights_only=True)` reads it and nothing in it can run.
"""

import enum
import logging
import os
import pathlib

import numpy as np
import torch
from detectron2.structures import BitMasks, Boxes, BoxMode, Instances, Keypoints, PolygonMasks, RotatedBoxes

from ..errors import UserError
from ..files import write_whole

logger = logging.getLogger(__name__)

FORMAT = "d2amp_ext.nonfinite.1"
FOLDER = "nonfinite"
KEEP_FIRST, KEEP_NEWEST = 2, 3

_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSOR_HOLDERS = {cls.__name__: cls for cls in (RotatedBoxes, Boxes, BitMasks, Keypoints)}  # derived ones first

# What a bundle must hold, and of which type.
_FIELDS = {
    "iteration": int,
    "rank": int,
    "precision": str,
    "scale": float,
    "random": (dict, type(None)),
    "batches": tuple,
    "config": str,
    "config_kind": str,
    "versions": dict,
    "losses": dict,
    "finding": dict,
    "weights": (dict, type(None)),
}


class BundleError(UserError):
    """A bundle that is missing, damaged, or holds what is no bundle's."""


# Batches


def encode(value):
    """Nested values as plain types and tensors: plain ones as they are, others as tuples that begin with their kind.

    Knows tensors, arrays, lists, tuples, dicts, paths, enums, `Instances`, `Boxes`, `RotatedBoxes`, `BitMasks`,
    `PolygonMasks` and `Keypoints`. Anything else is left out, and named in the log.
    """
    if isinstance(value, enum.Enum):  # BoxMode is an int, too
        return ("box_mode", int(value)) if isinstance(value, BoxMode) else encode(value.value)
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return ("tensor", _alone(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ("array", torch.from_numpy(np.array(value, order="C")))
    if isinstance(value, dict):
        return ("dict", [(encode(name), encode(item)) for name, item in value.items()])
    if isinstance(value, (list, tuple)):
        return ("list" if isinstance(value, list) else "tuple", [encode(item) for item in value])
    if isinstance(value, Instances):
        fields = [(name, encode(item)) for name, item in value.get_fields().items()]
        return ("Instances", [int(side) for side in value.image_size], fields)
    if isinstance(value, PolygonMasks):
        return ("PolygonMasks", encode(value.polygons))
    for name, cls in _TENSOR_HOLDERS.items():
        if isinstance(value, cls):
            return (name, _alone(value.tensor))
    if isinstance(value, pathlib.PurePath):
        return str(value)
    logger.warning(f"The bundle leaves out a {type(value).__module__}.{type(value).__qualname__} in the batch.")
    return ("left_out", f"{type(value).__module__}.{type(value).__qualname__}")


def _alone(tensor):
    """On the CPU, without a graph, and without the rest of a larger storage of which it may be a part."""
    tensor = tensor.detach().as_subclass(torch.Tensor).cpu()
    return tensor.contiguous().clone() if tensor.layout is torch.strided else tensor


def decode(value):
    """The inverse of `encode`. What was left out of a dict is missing in it, and None elsewhere."""
    if isinstance(value, _PLAIN):
        return value
    kind, content = value[0], value[1]
    if kind == "tensor":
        return _tensor(content)
    if kind == "array":
        return _tensor(content).numpy()
    if kind == "dict":
        kept = [(name, item) for name, item in content if not (isinstance(item, tuple) and item[0] == "left_out")]
        return {decode(name): decode(item) for name, item in kept}
    if kind in ("list", "tuple"):
        items = [decode(item) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "Instances":
        height, width = map(int, content)
        return Instances((height, width), **{name: decode(item) for name, item in value[2]})
    if kind == "PolygonMasks":
        return PolygonMasks(decode(content))
    if kind in _TENSOR_HOLDERS:
        return _TENSOR_HOLDERS[kind](_tensor(content))
    if kind == "box_mode":
        return BoxMode(content)
    if kind == "left_out":
        return None
    raise ValueError(f"{kind!r} is no kind of value")


def _tensor(value):
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__} where a tensor belongs")
    return value


# Files


def write_bundle(folder, bundle):
    """Writes a bundle into a folder, whole or not at all, and removes older ones but the first and the newest.

    Args:
        folder (str): is made when it is missing.
        bundle (dict): the fields of a bundle; "batches" as the model takes them.

    Returns:
        str: the path of the file.
    """
    os.makedirs(folder, exist_ok=True)
    content = {"format": FORMAT, **bundle, "batches": encode(list(bundle["batches"]))}
    path = os.path.join(folder, f"iteration_{bundle['iteration']:07d}_rank{bundle['rank']}.pth")
    write_whole(path, lambda file: torch.save(content, file))
    _remove_old(folder, f"_rank{bundle['rank']}.pth", path)
    return path


def _remove_old(folder, suffix, newest):
    """Every rank keeps its own: none removes a file that another one is writing."""
    paths = [entry for entry in os.scandir(folder) if entry.name.endswith(suffix) and entry.path != newest]
    paths = [entry.path for entry in sorted(paths, key=lambda entry: (entry.stat().st_mtime_ns, entry.name))]
    for path in [*paths, newest][KEEP_FIRST:-KEEP_NEWEST]:
        os.remove(path)


def read_bundle(path):
    """A bundle as `write_bundle` was given it.

    Raises:
        BundleError: for a file that is missing, damaged, would run code, or holds something else.
    """
    if not os.path.isfile(path):
        raise BundleError(f"The bundle {path} does not exist. Name a file of the folder {FOLDER}/ in the output of a run.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers raise nearly everything
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise BundleError(
            f"The bundle {path} cannot be read: it is damaged, or holds what no bundle holds and could run code "
            f"({reason}). Copy it again from where it was written."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = repr(content.get("format"))[:80] if isinstance(content, dict) else type(content).__name__
        raise BundleError(f"{path} is no bundle of this version: its format is {found}, and must be {FORMAT!r}.")
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name, ...), kind):
            raise BundleError(f"The bundle {path} is damaged: its {name!r} is a {type(content.get(name)).__name__}.")
    try:
        return {**content, "batches": decode(content["batches"])}
    except Exception as error:  # whatever a structure that nobody wrote makes of itself
        raise BundleError(f"The bundle {path} is damaged: its batches cannot be made again ({error}).") from error
