"""Bundles: batches as plain types and back, files that run no code, and what is done with those that are not whole."""

import os
import pathlib
import pickle
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
from detectron2.structures import (
    BitMasks,
    Boxes,
    BoxMode,
    Instances,
    Keypoints,
    PolygonMasks,
    RotatedBoxes,
)

from d2amp_ext import UserError, random_state
from d2amp_ext.numerics.bundle import FORMAT, BundleError, decode, encode, read_bundle, write_bundle


def instances():
    made = Instances((20, 30))
    made.gt_boxes = Boxes(torch.tensor([[0.0, 1, 2, float("inf")], [1, 1, 4, 4]]))
    made.gt_classes = torch.tensor([3, 1])
    made.gt_masks = PolygonMasks([[np.array([0.0, 0, 5, 5, 0, 5.5])], [np.arange(6.0), np.arange(8.0)]])
    made.gt_bits = BitMasks(torch.rand(2, 4, 5) > 0.5)
    made.gt_keypoints = Keypoints(torch.rand(2, 17, 3))
    made.rotated = RotatedBoxes(torch.rand(2, 5))
    made.names = ["a", "b"]
    return made


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    if isinstance(a, Instances):
        return a.image_size == b.image_size and same(a.get_fields(), b.get_fields())
    if isinstance(a, PolygonMasks):
        return same(a.polygons, b.polygons)
    if hasattr(a, "tensor"):
        return type(a) is type(b) and same(a.tensor, b.tensor)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def batch():
    return [
        {"image": torch.randint(0, 255, (3, 8, 9), dtype=torch.uint8), "file_name": "images/a b.png", "height": 8,
         "instances": instances(), "sem_seg": torch.zeros(8, 9, dtype=torch.long), "mode": BoxMode.XYXY_ABS},
        {"image": torch.full((3, 4, 4), float("nan")), "image_id": 7, "nested": {"crop": (1, 2.5, None, True), 5: [b"x"]},
         "map": np.arange(12, dtype=np.uint16).reshape(3, 4)[::-1], "half": torch.ones(2, dtype=torch.bfloat16)},
    ]  # fmt: skip


def bundle(**changes):
    fields = {"iteration": 12, "rank": 0, "precision": "bf16", "scale": 1.0, "random": random_state.capture(), "config": "A: 1\n",
              "config_kind": "yaml", "versions": {}, "losses": {"loss": float("nan")}, "finding": {}, "weights": None}  # fmt: skip
    return {**fields, "batches": [batch()], **changes}


def test_there_and_back(tmp_path):
    torch.manual_seed(0)
    given = bundle(weights={"w": torch.ones(2)})
    path = write_bundle(tmp_path / "nonfinite", given)
    assert os.path.basename(path) == "iteration_0000012_rank0.pth" and os.listdir(tmp_path / "nonfinite") == [os.path.basename(path)]
    read = read_bundle(path)
    assert same(given["batches"], read["batches"]) and same(given["random"], read["random"])
    assert same(given["losses"], read["losses"]) and torch.equal(read["weights"]["w"], torch.ones(2))
    assert read["batches"][0][0]["mode"] is BoxMode.XYXY_ABS


def test_what_plain_types_cannot_hold_becomes_the_nearest_that_they_can(caplog):
    class Opaque:
        pass

    given = OrderedDict(path=pathlib.Path("a/b.png"), number=np.float32(0.5), opaque=Opaque(), inside=[1, Opaque()])
    assert decode(encode(given)) == {"path": "a/b.png", "number": 0.5, "inside": [1, None]}
    assert "leaves out" in caplog.text and "Opaque" in caplog.text


def test_a_part_of_a_tensor_is_written_alone(tmp_path):
    large = torch.zeros(1000, 1000)
    path = write_bundle(tmp_path, bundle(batches=[[{"image": large[0]}]]))
    assert os.path.getsize(path) < 100_000


def test_tensors_are_taken_as_they_are_now():
    image = torch.ones(3, requires_grad=True)
    kept = encode(image)
    with torch.no_grad():
        image += 1
    assert decode(kept).tolist() == [1, 1, 1] and not decode(kept).requires_grad


def test_which_are_kept(tmp_path):
    for number in [5, 9, 300, 7, 8, 20, 21]:  # a folder that is used again: the order is that of writing
        write_bundle(tmp_path, bundle(iteration=number, batches=[]))
        time.sleep(0.02)
    assert sorted(int(name[10:17]) for name in os.listdir(tmp_path)) == [5, 8, 9, 20, 21]
    write_bundle(tmp_path, bundle(iteration=21, rank=1, batches=[]))
    assert len(os.listdir(tmp_path)) == 6  # each rank has its own


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    write_bundle(tmp_path, bundle(batches=[]))

    def fail(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        write_bundle(tmp_path, bundle(iteration=13, batches=[]))
    assert os.listdir(tmp_path) == ["iteration_0000012_rank0.pth"]


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-was-here",)


def damaged(tmp_path, kind):
    path = tmp_path / "bundle.pth"
    content = torch.load(write_bundle(tmp_path / "good", bundle()), weights_only=True)
    if kind == "cut":
        path.write_bytes(open(write_bundle(tmp_path / "good", bundle()), "rb").read()[:-2000])
    elif kind == "text":
        path.write_text("no bundle")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hostile":
        torch.save({**content, "batches": Hostile()}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Hostile()))
    elif kind == "another format":
        torch.save({**content, "format": "d2amp_ext.nonfinite.9"}, path)
    elif kind == "a checkpoint":
        torch.save({"model": {}}, path)
    elif kind == "a list":
        torch.save([1], path)
    else:
        name, value = kind
        torch.save({**content, name: value}, path)
    return path


DAMAGE = ["cut", "text", "empty", "hostile", "pickle", "another format", "a checkpoint", "a list", ("config", 3), ("random", []),
          ("batches", ("exec", "1")), ("batches", ("list", 5)), ("batches", ()), ("batches", ("tensor", 3)), ("scale", "1"),
          ("batches", ("Instances", "x", [])), ("batches", ("list", [("Boxes", torch.zeros(3, 9, 2))])), ("iteration", None)]  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE, ids=str)
def test_a_damaged_or_hostile_file_is_one_clear_error(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError) as error:
        read_bundle(damaged(tmp_path, kind))
    assert "bundle.pth" in str(error.value) and len(str(error.value).splitlines()) <= 3
    assert isinstance(error.value, UserError) and not os.path.exists("hostile-was-here")
    if kind == "another format":
        assert "d2amp_ext.nonfinite.9" in str(error.value) and FORMAT in str(error.value)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(BundleError, match="does not exist.*nonfinite/"):
        read_bundle(tmp_path / "nothing.pth")
