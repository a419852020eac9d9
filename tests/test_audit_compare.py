"""How far apart two results are: tensors, boxes, instances."""

import math

import pytest
import torch
from detectron2.structures import Boxes, Instances, RotatedBoxes

from d2amp_ext.audit.compare import box_error, error_between, match, tensor_error


def instances(boxes, classes=None, **fields):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    classes = torch.zeros(len(boxes), dtype=torch.int64) if classes is None else torch.tensor(classes)
    return Instances((100, 100), pred_boxes=Boxes(boxes), pred_classes=classes, **fields)


BOXES = [[0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 90, 90]]


def test_tensors():
    wanted = torch.tensor([3.0, 4.0])
    assert tensor_error(wanted.clone(), wanted) == 0
    assert tensor_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert tensor_error(wanted, wanted.reshape(2, 1)) == 1
    assert tensor_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0  # integers are choices
    assert tensor_error(torch.tensor(1e-5), torch.tensor(0.0)) == pytest.approx(0.01)  # a loss of about 0
    assert tensor_error(torch.zeros(3), torch.zeros(3)) == 0


def test_what_is_not_finite():
    inf, nan = math.inf, math.nan
    assert tensor_error(torch.tensor([1.0, inf]), torch.tensor([1.0, 2.0])) == inf
    assert tensor_error(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])) == inf
    assert tensor_error(torch.tensor([1.0, -inf]), torch.tensor([1.0, -inf])) == 0  # what masks are made of
    assert tensor_error(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == 0  # in fp32, too


def test_boxes_are_compared_with_their_sides():
    wanted = torch.tensor([[900.0, 900, 920, 920]])
    assert box_error(wanted + 2, wanted) == pytest.approx(0.1)
    assert box_error(wanted / 1024 + 2 / 1024, wanted / 1024) == pytest.approx(0.1)  # in parts of the image
    rotated = torch.tensor([[900.0, 900, 20, 20, 45]])
    assert box_error(rotated + torch.tensor([[2.0, 2, 0, 0, 9]]), rotated) == pytest.approx(0.05)
    assert error_between(RotatedBoxes(rotated), RotatedBoxes(rotated)) == 0
    assert box_error(wanted[:0], wanted[:0]) == 0 and box_error(wanted, wanted[:0]) == 1
    assert box_error(wanted * math.nan, wanted) == math.inf


def test_tensors_of_corners_are_boxes_and_others_are_not():
    corners = torch.tensor(BOXES + [[880.0, 880, 900, 900]])
    assert error_between(corners + 1, corners) == box_error(corners + 1, corners) > 0.04
    assert error_between((corners + 1).reshape(1, 2, 8), corners.reshape(1, 2, 8)) == box_error(corners + 1, corners)
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert error_between(features * 1.01, features) == pytest.approx(0.01, rel=1e-3)
    assert error_between(torch.ones(8, 4) * 1.01, torch.ones(8, 4)) == pytest.approx(0.01, rel=1e-3)


def test_instances_are_matched():
    wanted = instances(BOXES, [0, 1, 2])
    assert error_between(wanted, wanted) == 0
    assert error_between(wanted[torch.tensor([2, 0, 1])], wanted) == 0
    assert error_between(wanted[:2], wanted) == pytest.approx(1 / 3)
    assert error_between(instances(BOXES, [0, 1, 1]), wanted) == pytest.approx(1 / 3)
    assert error_between(instances([]), instances([])) == 0 and error_between(instances([]), wanted) == 1
    degenerate = instances([[5, 5, 5, 5], [7, 7, 7, 9]])  # overlap with nothing, and are the same all the same
    assert error_between(degenerate, degenerate) == 0


def test_pairs_are_unique_and_the_best_first():
    wanted = instances([[0, 0, 10, 10], [1, 0, 11, 10]])
    found = instances([[1, 0, 11, 10], [50, 50, 60, 60], [0, 0, 10, 10]])
    assert match(found, wanted) == [(2, 0), (0, 1)]
    assert match(found[:1], wanted) == [(0, 1)]


def test_nested_values():
    wanted = {"a": [torch.ones(3), (torch.zeros(2), Boxes(torch.tensor(BOXES).float()))], "b": None, "c": "text"}
    assert error_between(wanted, wanted) == 0
    found = {"a": [torch.ones(3) * 1.5, (torch.zeros(2), wanted["a"][1][1])], "b": None, "c": "text"}
    assert error_between(found, wanted) == pytest.approx(0.5)
    assert error_between({"a": wanted["a"][:1]}, {"a": wanted["a"]}) == 1
