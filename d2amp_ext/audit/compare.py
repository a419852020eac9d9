"""How far apart two results of the same code are, as one number: 0 the same, 1 nothing in common, infinite no result."""

import math

import torch
from detectron2.structures import Boxes, Instances, RotatedBoxes, pairwise_iou

SMALLEST = 1e-3  # of a single number, such as a loss
MATCH_IOU = 0.5
FEWEST_BOXES = 4  # rows that are ordered as corners are by chance are rare enough from then on


def error_between(found, wanted):
    """The relative error of nested values; of several, the largest.

    Boxes, also as plain tensors of corners, are compared with their own sides and not with their coordinates: an error of
    2 pixels at 1000 is 0.2 % of the coordinate, and much for a box of 20. `Instances` are matched before. Integers do
    not count.

    Args:
        found, wanted: outputs of the same code.

    Returns:
        float: infinite where `found` is not finite and `wanted` is.
    """
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        corners = _corners(wanted) if found.shape == wanted.shape else None
        return tensor_error(found, wanted) if corners is None else box_error(found.reshape(-1, 4), corners)
    if isinstance(wanted, Instances) and isinstance(found, Instances):
        return _instances_error(found, wanted)
    if isinstance(wanted, (Boxes, RotatedBoxes)) and type(found) is type(wanted):
        return box_error(found.tensor, wanted.tensor)
    if isinstance(wanted, dict) and isinstance(found, dict):
        return max((error_between(found[name], wanted[name]) for name in wanted if name in found), default=0.0)
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(wanted):
            return 1.0
        return max((error_between(*pair) for pair in zip(found, wanted)), default=0.0)
    inner = [getattr(value, "tensor", None) for value in (found, wanted)]  # ImageList, masks, keypoints
    return tensor_error(*inner) if all(isinstance(value, torch.Tensor) for value in inner) else 0.0


def tensor_error(found, wanted):
    """As `error_between`, of two tensors."""
    if not wanted.is_floating_point() or not found.is_floating_point():
        return 0.0
    if found.shape != wanted.shape:
        return 1.0
    found, wanted = found.detach().double(), wanted.detach().double()
    usable = torch.isfinite(wanted)  # minus infinity is what masks are made of
    if not torch.isfinite(found[usable]).all():
        return math.inf
    distance = torch.where(usable, found - wanted, 0.0).norm().item()
    if distance == 0:
        return 0.0
    size = torch.where(usable, wanted, 0.0).norm().item()
    return distance / max(size, SMALLEST if wanted.numel() == 1 else 1e-30)


def _corners(tensor):
    """A tensor as (N, 4) if it looks like corners of boxes, x before x and y before y in each; else None."""
    if tensor.ndim < 2 or tensor.shape[-1] % 4 or not tensor.is_floating_point() or tensor.numel() < 4 * FEWEST_BOXES:
        return None
    corners = tensor.reshape(-1, 4)
    sides = corners[:, 2:] - corners[:, :2]
    return corners if (sides >= 0).all() and (sides > 0).all(1).float().mean() > 0.5 else None


def box_error(found, wanted):
    """The mean distance of coordinates over the side of the box, a side being no shorter than a pixel; or, of boxes in
    parts of the image, than a thousandth.

    Args:
        found, wanted (Tensor): (N, 4), XYXY, or (N, 5), (x, y, w, h, angle).
    """
    if found.shape != wanted.shape:
        return 1.0
    if not len(wanted):
        return 0.0
    found, wanted = found.detach().double(), wanted.detach().double()
    usable = torch.isfinite(wanted).all(1)
    if not torch.isfinite(found[usable]).all():
        return math.inf
    found, wanted = found[usable], wanted[usable]
    sides = wanted[:, 2:4] if wanted.shape[1] == 5 else wanted[:, 2:] - wanted[:, :2]
    least = 1.0 if wanted.numel() and wanted.abs().max() > 2 else 1e-3
    side = sides.clamp(min=least).prod(1).sqrt()
    distances = (found - wanted).abs()[:, :4].mean(1) / side
    return distances.mean().item() if len(distances) else 0.0


def _boxes_of(instances):
    return next((value for value in instances.get_fields().values() if isinstance(value, (Boxes, RotatedBoxes))), None)


def _classes_of(instances):
    return next((instances.get(name) for name in ("pred_classes", "gt_classes") if instances.has(name)), None)


def _instances_error(found, wanted):
    """Of matched instances the error of their fields; each that has no partner counts 1."""
    ours, theirs = _boxes_of(found), _boxes_of(wanted)
    if ours is None or theirs is None or type(ours) is not type(theirs):
        return error_between(found.get_fields(), wanted.get_fields())
    if not torch.isfinite(ours.tensor).all() and torch.isfinite(theirs.tensor).all():
        return math.inf
    if not len(wanted) or not len(found):
        return float(len(wanted) != len(found))
    pairings = [match(found, wanted)]
    if len(found) == len(wanted) and _same_classes(found, wanted):  # boxes without an area overlap with nothing
        pairings.append([(number, number) for number in range(len(found))])
    return min((_matched_error(found, wanted, pairs) for pairs in pairings if pairs), default=1.0)


def _same_classes(found, wanted):
    ours, theirs = _classes_of(found), _classes_of(wanted)
    return ours is None or theirs is None or torch.equal(ours, theirs.to(ours.device))


def _matched_error(found, wanted, pairs):
    left, right = (torch.tensor(side) for side in zip(*pairs))
    found, wanted, most = found[left], wanted[right], max(len(found), len(wanted))
    matched = max(error_between(value, wanted.get(name)) for name, value in found.get_fields().items() if wanted.has(name))
    return matched if math.isinf(matched) else (matched * len(pairs) + most - len(pairs)) / most


def match(found, wanted, least=MATCH_IOU):
    """Pairs of instances of the same class whose boxes overlap, each in one pair: the best overlaps first.

    Rotated boxes, whose overlaps need Detectron2's compiled module, are paired in their order.

    Returns:
        list[(int, int)]: indices into `found` and `wanted`.
    """
    ours, theirs = _boxes_of(found), _boxes_of(wanted)
    if isinstance(theirs, RotatedBoxes):
        return [(number, number) for number in range(min(len(found), len(wanted)))]
    overlaps = pairwise_iou(Boxes(ours.tensor.float()), Boxes(theirs.tensor.float().to(ours.tensor.device)))
    kinds = _classes_of(found), _classes_of(wanted)
    if all(kind is not None for kind in kinds):
        overlaps = overlaps * (kinds[0][:, None] == kinds[1][None, :].to(overlaps.device))
    rows, columns = (overlaps >= least).nonzero(as_tuple=True)
    order = overlaps[rows, columns].argsort(descending=True, stable=True).tolist()
    rows, columns = rows.tolist(), columns.tolist()
    pairs, taken, given = [], set(), set()
    for number in order:
        row, column = rows[number], columns[number]
        if row not in taken and column not in given:
            taken.add(row)
            given.add(column)
            pairs.append((row, column))
    return sorted(pairs, key=lambda pair: pair[1])
