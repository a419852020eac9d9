"""Predictions of two runs: matched, gained, lost, and how far apart."""

import copy
import math

import pytest
import torch
from audit_models import grid, policy
from detectron2.structures import Boxes, Instances

from d2amp_ext import random_state
from d2amp_ext.audit.detections import compare_predictions, predict


def prediction(boxes, scores, classes=None, **fields):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    classes = torch.tensor(classes or [0] * len(boxes))
    return {"instances": Instances((100, 100), pred_boxes=Boxes(boxes), scores=torch.tensor(scores), pred_classes=classes, **fields)}


BOXES = [[0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 90, 90]]


def test_the_same_predictions():
    found = compare_predictions([prediction(BOXES, [0.9, 0.8, 0.7])], [prediction(BOXES, [0.9, 0.8, 0.7])])
    assert (found.images, found.matched, found.gained, found.lost, found.iou, found.score_shift) == (1, 3, 0, 0, 1, 0)
    assert found.share_changed == 0 and found.mask_iou is None and found.unusable == 0


def test_shifts_gains_and_losses():
    moved = [[0, 0, 10, 9], *BOXES[1:2], [0, 50, 10, 60]]
    found = compare_predictions([prediction(moved, [0.8, 0.85, 0.9])], [prediction(BOXES, [0.9, 0.8, 0.7])])
    assert (found.matched, found.gained, found.lost) == (2, 1, 1) and found.share_changed == 0.5
    assert found.worst_iou == pytest.approx(0.9) and found.iou == found.mean_iou == pytest.approx(0.95)
    assert found.worst_score_shift == pytest.approx(0.1) and found.score_shift == pytest.approx(0.075)


def test_a_partner_may_be_less_confident_and_what_nobody_is_sure_of_does_not_count():
    wanted = prediction(BOXES, [0.9, 0.26, 0.05])
    found = compare_predictions([prediction(BOXES[:2], [0.9, 0.24])], [wanted])
    assert (found.matched, found.gained, found.lost) == (2, 0, 0)
    unsure = prediction(BOXES, [0.1, 0.09, 0.01])  # the best that this model has
    assert compare_predictions([prediction([], [])], [unsure]).lost == 2


def test_another_class_is_another_detection():
    found = compare_predictions([prediction(BOXES, [0.9] * 3, [0, 0, 1])], [prediction(BOXES, [0.9] * 3)])
    assert (found.matched, found.gained, found.lost) == (2, 1, 1)


def test_one_box_that_suppression_chose_otherwise_does_not_move_the_median():
    boxes = [[20 * n, 0, 20 * n + 16, 10] for n in range(5)]
    found = compare_predictions([prediction([[4, 0, 20, 10], *boxes[1:]], [0.9] * 5)], [prediction(boxes, [0.9] * 5)])
    assert found.matched == 5 and found.iou == 1 and found.worst_iou == pytest.approx(0.6) and found.mean_iou == pytest.approx(0.92)


def test_masks_keypoints_and_segmentation():
    masks = torch.zeros(1, 100, 100, dtype=torch.bool)
    masks[:, :10, :10] = True
    smaller = masks.clone()
    smaller[:, 5:] = False
    points = torch.tensor([[[1.0, 2.0, 0.5], [3.0, 4.0, 0.5]]])
    wanted = prediction(BOXES[:1], [0.9], pred_masks=masks, pred_keypoints=points)
    got = prediction(BOXES[:1], [0.9], pred_masks=smaller, pred_keypoints=points + torch.tensor([3.0, 4.0, 0.0]))
    classes = torch.zeros(2, 4, 4)
    changed = classes.clone()
    changed[1, 0] = 1
    found = compare_predictions([{**got, "sem_seg": changed}], [{**wanted, "sem_seg": classes}])
    assert (found.mask_iou, found.keypoint_shift, found.pixels_changed) == (0.5, 5.0, 0.25)


def test_values_that_are_not_finite():
    found = compare_predictions([prediction([[0, 0, math.nan, 5]], [0.9])], [prediction(BOXES[:1], [0.9])])
    assert found.unusable == 1 and found.lost == 1


def test_predictions_are_fp32_one_by_one_and_leave_no_trace():
    model, _, images = grid()
    before, random = copy.deepcopy(model.state_dict()), random_state.capture()
    model.train()
    found = predict(model, policy("bf16"), images, random)
    assert len(found) == 4 and model.training
    assert all(output["instances"].scores.dtype is torch.float32 for output in found)
    alone = predict(model, policy("bf16"), images[2:3], random)
    assert torch.equal(alone[0]["instances"].scores, found[2]["instances"].scores)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random["torch"], random_state.capture()["torch"])
