"""Predictions of two runs on the same images: what was found by both, how far apart, and what by one of them only."""

import logging
import math
import statistics
from dataclasses import dataclass

import torch
from detectron2.structures import Instances

from .. import random_state
from ..evaluation import to_fp32
from ..numerics.apart import apart
from .compare import box_error, match
from .training import is_of_the_precision

logger = logging.getLogger(__name__)

CONFIDENCE = 0.25  # below it, whether a detection is there is chance; a partner may be less confident


@dataclass
class Detections:
    """How predictions differ from those in fp32.

    Attributes:
        images (int): that were compared.
        matched (int): detections that both runs have.
        gained, lost (int): confident detections without a partner, of the audited run and of the fp32 run.
        iou (float): median of the matched boxes; 1 without any. An object for which non-maximum suppression chose another
            box does not hide that all the others are where they were.
        mean_iou, worst_iou (float):
        score_shift (float): median distance of the matched scores.
        mean_score_shift, worst_score_shift (float):
        mask_iou (float or None): mean of the matched masks, where there are any.
        keypoint_shift (float or None): mean distance in pixels.
        pixels_changed (float or None): share of pixels of another class in semantic segmentation.
        unusable (int): images without predictions, or whose predictions hold values that are not finite.
    """

    images: int = 0
    matched: int = 0
    gained: int = 0
    lost: int = 0
    iou: float = 1.0
    mean_iou: float = 1.0
    worst_iou: float = 1.0
    score_shift: float = 0.0
    mean_score_shift: float = 0.0
    worst_score_shift: float = 0.0
    mask_iou: float = None
    keypoint_shift: float = None
    pixels_changed: float = None
    unusable: int = 0

    @property
    def share_changed(self):
        """Gained and lost detections as a share of all."""
        return (self.gained + self.lost) / max(self.matched + self.gained + self.lost, 1)


def predict(model, policy, images, random):
    """What a model returns for images, one at a time, on the CPU and in fp32.

    Args:
        model (nn.Module): protected as the policy says; left as it was.
        policy (PrecisionPolicy): resolved.
        images (list[dict]): as the model takes them.
        random (dict): a state of `random_state.capture`.

    Returns:
        list[dict]: {} for an image that the model cannot be run on in this precision.
    """
    found = []
    with policy.float32_switches(), apart(model, random), torch.no_grad():
        model.eval()
        for image in images:
            random_state.restore(random)
            try:
                with policy.autocast():
                    (output,) = model([image])
            except Exception as error:
                if not is_of_the_precision(error, reference=policy.precision == "fp32"):
                    raise
                logger.warning(f"The prediction of an image in {policy.precision} raised {type(error).__name__}: {error}")
                output = {}
            found.append({name: _on_cpu(value) for name, value in to_fp32(output).items()})
    return found


def _on_cpu(value):
    return value.to("cpu") if hasattr(value, "to") else value


def compare_predictions(found, wanted):
    """Detections: how the predictions of one run differ from those in fp32.

    Args:
        found, wanted (list[dict]): as `predict` gives them.
    """
    result = Detections(images=len(wanted))
    overlaps, shifts, masks, points, pixels = [], [], [], [], []
    for got, want in zip(found, wanted):
        result.unusable += bool(want) and not got
        instances = [side.get("instances") for side in (got, want)]
        if all(isinstance(side, Instances) for side in instances):
            result.unusable += not _is_finite(instances[0])
            _compare_instances(*instances, result, overlaps, shifts, masks, points)
        if "sem_seg" in want and "sem_seg" in got:
            classes = [side["sem_seg"].argmax(0) for side in (got, want)]
            pixels.append((classes[0] != classes[1]).float().mean().item())
            result.unusable += not torch.isfinite(got["sem_seg"]).all().item()
    if overlaps:
        result.matched = len(overlaps)
        result.iou, result.mean_iou, result.worst_iou = statistics.median(overlaps), _mean(overlaps), min(overlaps)
        result.score_shift, result.mean_score_shift = statistics.median(shifts), _mean(shifts)
        result.worst_score_shift = max(shifts)
    for name, values in (("mask_iou", masks), ("keypoint_shift", points), ("pixels_changed", pixels)):
        if values:
            setattr(result, name, _mean(values))
    return result


def _compare_instances(found, wanted, result, overlaps, shifts, masks, points):
    confident = [_confident(side) for side in (found, wanted)]
    pairs = match(found, wanted) if len(found) and len(wanted) else []
    partners = [{pair[side] for pair in pairs} for side in (0, 1)]
    result.gained += len(confident[0] - partners[0])
    result.lost += len(confident[1] - partners[1])
    for left, right in pairs:
        if left not in confident[0] and right not in confident[1]:
            continue
        one, other = found[left], wanted[right]
        overlaps.append(_iou(one.pred_boxes.tensor, other.pred_boxes.tensor))
        shifts.append((one.scores - other.scores).abs().item())
        if one.has("pred_masks") and other.has("pred_masks"):
            both = [side.pred_masks > 0.5 if side.pred_masks.is_floating_point() else side.pred_masks for side in (one, other)]
            if both[0].shape == both[1].shape:
                union = (both[0] | both[1]).sum().item()
                masks.append((both[0] & both[1]).sum().item() / union if union else 1.0)
        if one.has("pred_keypoints") and other.has("pred_keypoints"):
            points.append((one.pred_keypoints - other.pred_keypoints)[..., :2].norm(dim=-1).mean().item())


def _iou(one, other):
    if one.shape[1] != 4:  # rotated boxes: their overlaps need Detectron2's compiled module
        return 1 - min(box_error(one, other), 1.0)
    low, high = torch.maximum(one[:, :2], other[:, :2]), torch.minimum(one[:, 2:], other[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    area = (one[:, 2:] - one[:, :2]).prod(1) + (other[:, 2:] - other[:, :2]).prod(1) - shared
    return (shared / area.clamp(min=1e-9)).item()


def _confident(instances):
    """The indices of detections that count: of an unsure model, those of at least half of the best score."""
    scores = instances.scores if instances.has("scores") else torch.ones(len(instances))
    least = min(CONFIDENCE, scores.max().item() / 2) if len(scores) else 0.0
    boxes = instances.pred_boxes.tensor
    has_area = (boxes[:, 2:4] > 0).all(1) if boxes.shape[1] == 5 else (boxes[:, 2:] > boxes[:, :2]).all(1)
    return set(((scores >= least) & has_area).nonzero().flatten().tolist())


def _is_finite(instances):
    tensors = [getattr(value, "tensor", value) for value in instances.get_fields().values()]
    return all(torch.isfinite(t).all() for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())


def _mean(values):
    return math.fsum(values) / len(values)
