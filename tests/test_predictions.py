import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, Instances, RotatedBoxes
from pycocotools import mask as coco_mask

from d2amp_ext import UserError
from d2amp_ext.predictions import at_confidence, draw, to_records

SIZE = (240, 320)
NAMES = Metadata(
    thing_classes=["cat", "dog"],
    stuff_classes=["sky", "grass", "sea"],
    thing_dataset_id_to_contiguous_id={17: 0, 18: 1},
)


def picture():
    return np.full((*SIZE, 3), 90, dtype=np.uint8)


def instances(**fields):
    """A cat at x 10, y 20, 30 wide and 25 high, and a dog that is less sure."""
    boxes = torch.tensor([[10.0, 20.0, 40.0, 45.0], [50.0, 5.0, 70.0, 15.0]])
    scores, classes = torch.tensor([0.75, 0.25]), torch.tensor([0, 1])
    return Instances(SIZE, **{"pred_boxes": Boxes(boxes), "scores": scores, "pred_classes": classes, **fields})


def masks():
    found = torch.zeros(2, *SIZE, dtype=torch.bool)
    found[0, 20:45, 10:40] = True
    found[1, 5:15, 50:70] = True
    return found


def panoptic():
    segments = torch.zeros(*SIZE, dtype=torch.int32)
    segments[120:], segments[10:20, 10:20] = 1, 2
    info = [
        {"id": 1, "isthing": False, "category_id": 1, "area": 38400},
        {"id": 2, "isthing": True, "category_id": 0, "score": 0.9, "instance_id": 0},
    ]
    return segments, info


def test_only_confident_instances_stay():
    predictions = {"instances": instances(pred_masks=masks()), "more": 1}
    kept = at_confidence(predictions, 0.5)
    assert kept["instances"].scores.tolist() == [0.75] and kept["instances"].pred_masks.shape == (1, *SIZE)
    assert kept["more"] == 1 and len(predictions["instances"]) == 2
    assert len(at_confidence(predictions, 0.25)["instances"]) == 2  # not below it
    segmentation = {"sem_seg": torch.zeros(3, *SIZE)}
    assert at_confidence(segmentation, 0.5) is segmentation
    with pytest.raises(UserError, match="The model returns proposals; drawn are instances"):
        at_confidence({"proposals": instances()}, 0.5)


def test_records_of_boxes_and_masks():
    records = to_records({"instances": instances(pred_masks=masks())}, NAMES, "a/b.png")
    assert [record["image"] for record in records] == ["a/b.png"] * 2
    assert [(record["category_id"], record["category_name"]) for record in records] == [(17, "cat"), (18, "dog")]
    assert records[0]["bbox"] == [10.0, 20.0, 30.0, 25.0] and records[0]["score"] == 0.75
    assert "image_id" not in records[0] and "keypoints" not in records[0]
    for record, mask in zip(records, masks()):
        assert (coco_mask.decode(record["segmentation"]) == mask.numpy()).all()


def test_classes_without_names_or_ids_are_numbered():
    records = to_records({"instances": instances()}, Metadata(thing_classes=["cat"]), "x")
    assert [(record["category_id"], record["category_name"]) for record in records] == [(0, "cat"), (1, "class 1")]


def test_records_of_keypoints_leave_the_predictions_alone():
    keypoints = torch.tensor([[[12.5, 22.5, 0.9], [30.5, 40.5, 0.8]]] * 2)
    found = instances(pred_keypoints=keypoints.clone())
    records = to_records({"instances": found}, NAMES, "x")
    assert records[0]["keypoints"] == pytest.approx([12.0, 22.0, 0.9, 30.0, 40.0, 0.8])
    assert torch.equal(found.pred_keypoints, keypoints)


def test_records_of_rotated_boxes_keep_the_angle():
    boxes = RotatedBoxes(torch.tensor([[25.0, 30.0, 20.0, 10.0, 45.0], [60.0, 10.0, 8.0, 4.0, 0.0]]))
    records = to_records({"instances": instances(pred_boxes=boxes)}, NAMES, "x")
    assert records[0]["bbox"] == [25.0, 30.0, 20.0, 10.0, 45.0]


def test_records_of_stuff():
    records = to_records({"instances": instances(), "panoptic_seg": panoptic()}, NAMES, "x")
    assert [record["category_name"] for record in records] == ["cat", "dog", "grass"]
    stuff = records[-1]
    assert "score" not in stuff and stuff["category_id"] == 1 and stuff["bbox"] == [0.0, 120.0, 320.0, 120.0]
    assert coco_mask.area(stuff["segmentation"]) == 38400

    scores = torch.zeros(3, *SIZE)
    scores[2, :, :160], scores[0, :, 160:] = 1, 1
    records = to_records({"sem_seg": scores}, NAMES, "x")
    assert [(record["category_name"], record["bbox"]) for record in records] == [
        ("sky", [160.0, 0.0, 160.0, 240.0]),
        ("sea", [0.0, 0.0, 160.0, 240.0]),
    ]


def test_nothing_found_is_an_empty_list_and_the_picture_itself():
    nothing = {"instances": instances()[[False, False]]}
    assert to_records(nothing, NAMES, "x") == []
    assert np.abs(draw(picture(), nothing, NAMES).astype(int) - 90).max() <= 1


@pytest.mark.parametrize(
    "predictions",
    [
        {"instances": instances()},
        {"instances": instances(pred_masks=masks())},
        {"instances": instances(pred_keypoints=torch.tensor([[[12.5, 22.5, 0.9], [30.5, 40.5, 0.8]]] * 2))},
        {"sem_seg": torch.eye(3).repeat_interleave(80, dim=1)[:, :, None].expand(3, *SIZE)},
        {"instances": instances(pred_masks=masks()), "sem_seg": torch.zeros(3, *SIZE), "panoptic_seg": panoptic()},
    ],
    ids=["boxes", "masks", "keypoints", "sem_seg", "panoptic"],
)
def test_drawing_marks_the_objects_and_keeps_the_size(predictions):
    drawn = draw(picture(), predictions, NAMES)
    assert drawn.shape == (*SIZE, 3) and drawn.dtype == np.uint8
    changed = np.abs(drawn.astype(int) - 90).max(axis=2) > 10
    assert changed[18:47, 8:42].any()
    assert "sem_seg" in predictions or not changed[150:, 200:].any()


def test_drawing_takes_bgr_and_returns_rgb():
    blue = np.zeros((*SIZE, 3), np.uint8)
    blue[:, :, 0] = 200
    drawn = draw(blue, {"instances": instances()[[False, False]]}, NAMES)
    assert np.abs(drawn[30, 30].astype(int) - [0, 0, 200]).max() <= 1
