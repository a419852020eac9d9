"""SOLVER.AMP.SHIELD: operators of Detectron2 that are wrong or missing in 16 bit, and what keeps them in fp32.

A new entry is a row of the table and, where none of those in `operators` fits, a function there.
"""

import functools
import importlib
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Dict, Tuple

import torch

from .island import clean_name, stock_class, subclass_like, unwrapped
from .operators import fp32_outputs, frozen_batch_norm, island, island_like_input, roi_align

logger = logging.getLogger(__name__)

_LAYERS = "detectron2.layers"
_ARCHITECTURES = "detectron2.modeling.meta_arch"
_HEADS = "detectron2.modeling.roi_heads"
_PROPOSALS = "detectron2.modeling.proposal_generator"
_BOXES = "detectron2.modeling.box_regression"

_PREDICTOR = dict.fromkeys(("losses", "inference", "predict_boxes", "predict_probs", "predict_boxes_for_gt_classes"), island)

# Class -> methods and what is done to each. Exact types only.
SHIELD = {
    # coordinates: 613.2 is 612 in bf16
    f"{_LAYERS}.ROIAlign": {"forward": roi_align},
    f"{_LAYERS}.ROIAlignRotated": {"forward": island_like_input},
    f"{_BOXES}.Box2BoxTransformLinear": {"apply_deltas": island},
    f"{_BOXES}.Box2BoxTransformRotated": {"apply_deltas": island},
    # no kernel for 16 bit, or none for bf16
    f"{_LAYERS}.DeformConv": {"forward": island_like_input},
    f"{_LAYERS}.ModulatedDeformConv": {"forward": island_like_input},
    # statistics and folded scales
    f"{_LAYERS}.NaiveSyncBatchNorm": {"forward": island_like_input},
    f"{_LAYERS}.FrozenBatchNorm2d": {"forward": frozen_batch_norm},
    # losses, scores, non-maximum suppression, decoding
    f"{_PROPOSALS}.RPN": {"losses": island, "predict_proposals": island},
    f"{_PROPOSALS}.rrpn.RRPN": {"losses": island, "predict_proposals": island},
    f"{_HEADS}.fast_rcnn.FastRCNNOutputLayers": _PREDICTOR,
    f"{_HEADS}.rotated_fast_rcnn.RotatedFastRCNNOutputLayers": _PREDICTOR,
    f"{_HEADS}.mask_head.MaskRCNNConvUpsampleHead": {"layers": fp32_outputs},
    f"{_HEADS}.keypoint_head.KRCNNConvDeconvUpsampleHead": {"layers": fp32_outputs},
    f"{_ARCHITECTURES}.retinanet.RetinaNet": {"losses": island, "inference_single_image": island},
    f"{_ARCHITECTURES}.fcos.FCOS": {"losses": island, "inference_single_image": island},
    f"{_ARCHITECTURES}.semantic_seg.SemSegFPNHead": {"layers": fp32_outputs},
}

# Class names of the DETR and Mask2Former family, whose definitions every project copies. All of `forward` in fp32.
SHIELD_BY_NAME = ("HungarianMatcher", "SetCriterion", "MSDeformAttn", "MultiScaleDeformableAttention")


@dataclass(frozen=True)
class Protection:
    """What of a model is kept in fp32.

    Attributes:
        shielded (dict[str, int]): class name -> how many of them the shield covers.
        left_alone (tuple[str]): subclasses of covered classes, as "qualified.name (Class, a RPN)".
        fp32_modules (dict[str, list[str]]): pattern of FP32_MODULES -> modules that it matched.
    """

    shielded: Dict[str, int]
    left_alone: Tuple[str, ...]
    fp32_modules: Dict[str, list]

    def describe(self):
        """One line for people."""
        parts = [f"{name} x{count}" if count > 1 else name for name, count in sorted(self.shielded.items())]
        text = f"shielded in fp32: {', '.join(parts) or 'nothing'}"
        for pattern, names in self.fp32_modules.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            text += f"; FP32_MODULES {pattern!r}: {shown}"
        if self.left_alone:
            text += f"; left alone, for they are classes of this project: {', '.join(self.left_alone)}"
        return text


def shield(model):
    """Makes what the table lists compute in fp32, in place. Doing it twice changes nothing.

    Args:
        model (nn.Module): in DistributedDataParallel or not.

    Returns:
        (dict, tuple): as in Protection.
    """
    rows = _rows()
    counts, left_alone, seen = Counter(), [], set()
    for name, module in unwrapped(model).named_modules():
        for label, value in _candidates(clean_name(name), module):
            if id(value) in seen:
                continue
            seen.add(id(value))
            cls = stock_class(value)
            if cls in rows:
                counts[cls.__name__] += 1
            elif cls.__name__ in SHIELD_BY_NAME and isinstance(value, torch.nn.Module):
                counts[cls.__name__] += 1
            else:
                base = next((base for base in cls.__mro__[1:] if base in rows), None)
                if base is not None:
                    left_alone.append(f"{label} ({cls.__name__}, a {base.__name__})")
                continue
            if not hasattr(type(value), "shielded"):
                value.__class__ = _shielded(type(value))
    return dict(counts), tuple(left_alone)


def methods_of(value):
    """The names of the methods that the table has for the class of an object, or for a class that it derives from."""
    rows = _rows()
    return next((tuple(rows[cls]) for cls in type(value).__mro__ if cls in rows), ())


def _candidates(name, module):
    """A module and the plain objects among its attributes, such as box transforms; with names for people."""
    yield name or type(module).__name__, module
    for attribute, value in vars(module).items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if type(item).__module__.startswith("detectron2.") and not isinstance(item, torch.nn.Module):
                yield f"{name}.{attribute}", item


@functools.lru_cache(maxsize=None)
def _rows():
    """The table with classes for their names. A Detectron2 that lacks a class has nothing to shield there."""
    rows = {}
    for path, methods in SHIELD.items():
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if cls is not None:
            rows[cls] = methods
    return rows


@functools.lru_cache(maxsize=None)
def _shielded(cls):
    stock = getattr(cls, "stands_for", cls)
    methods = _rows().get(stock, {"forward": island})
    replaced = {name: wrap(getattr(cls, name)) for name, wrap in methods.items() if hasattr(cls, name)}
    return subclass_like(cls, {**replaced, "shielded": True}, _shielded)


def report_frozen_scales(model):
    """Warns of FrozenBatchNorm2d layers whose folded scale or bias is not finite: their outputs cannot be, either."""
    from detectron2.layers import FrozenBatchNorm2d

    bad = []
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, FrozenBatchNorm2d):
            scale = module.weight * (module.running_var + module.eps).rsqrt()
            bias = module.bias - module.running_mean * scale
            if not (torch.isfinite(scale).all() and torch.isfinite(bias).all()):
                bad.append(clean_name(name))
    if bad:
        logger.warning(
            f"The folded scale of {', '.join(bad)} is not finite: their statistics (running_var, weight) are damaged, and "
            "every output of them will be NaN or infinite. Check MODEL.WEIGHTS."
        )
    return bad
