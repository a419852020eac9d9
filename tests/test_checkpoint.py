import collections
import os
import pickle

import numpy as np
import pytest
import torch
from conftest import TinyModel
from detectron2.checkpoint import DetectionCheckpointer

from d2amp_ext import PrecisionCheckpointer, UserError
from d2amp_ext.checkpoint import CheckpointError, check_weights, plain


class State:
    """A checkpointable that remembers what it was given."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointer(folder, value=0, cls=PrecisionCheckpointer):
    return cls(TinyModel(seed=value), str(folder), save_to_disk=True, trainer=State(value))


@pytest.fixture
def three(tmp_path):
    """A folder with checkpoints of iterations 1, 2 and 3; the last is the newest."""
    for value in (1, 2, 3):
        checkpointer(tmp_path, value).save(f"model_{value:07d}", iteration=value)
    return tmp_path


def resume(folder):
    ours = checkpointer(folder, 9)
    ours.resume_or_load("", resume=True)
    return ours.checkpointables["trainer"].value


def test_the_newest_is_resumed(three):
    assert resume(three) == 3
    assert sorted(os.listdir(three)) == ["last_checkpoint", *(f"model_000000{n}.pth" for n in (1, 2, 3))]


def damage(path, how):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(b"\x00garbage" * 50)
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "empty", "garbage", "missing"])
def test_a_damaged_or_missing_newest_falls_back_and_says_so(three, caplog, how):
    damage(three / "model_0000003.pth", how)
    assert resume(three) == 2
    assert "model_0000003.pth" in caplog.text and "Resumed from the older checkpoint" in caplog.text


def test_a_lost_pointer_is_no_lost_run(three):
    (three / "last_checkpoint").unlink()
    assert resume(three) == 3


def test_a_final_model_is_newer_than_numbered_ones(three):
    checkpointer(three, 8).save("model_final")
    (three / "last_checkpoint").unlink()
    assert resume(three) == 8


def test_when_none_can_be_read_the_error_names_them_all(three):
    for number in (1, 2, 3):
        damage(three / f"model_000000{number}.pth", "truncated")
    with pytest.raises(UserError) as error:
        resume(three)
    assert all(f"model_000000{number}.pth" in str(error.value) for number in (1, 2, 3))


def test_nothing_to_resume_means_the_given_weights(tmp_path):
    ours = checkpointer(tmp_path, 5)
    other = checkpointer(tmp_path / "other", 7)
    other.save("model_0000001")
    ours.resume_or_load(str(tmp_path / "other" / "model_0000001.pth"), resume=True)
    assert torch.equal(ours.model.first.weight, other.model.first.weight)
    assert ours.checkpointables["trainer"].value == 5  # only the model is taken


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(three, monkeypatch):
    before = (three / "model_0000003.pth").read_bytes()

    def half(data, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError):
        checkpointer(three, 4).save("model_0000003")
    assert (three / "model_0000003.pth").read_bytes() == before
    assert not [name for name in os.listdir(three) if "tmp" in name]


def test_weights_only_reads_every_file_and_numpy_becomes_plain(tmp_path):
    extra = {"best": np.float64(1.5), "count": np.int64(3), "array": np.arange(3), "tuple": (np.float32(2.0), "x")}
    checkpointer(tmp_path).save("model_0000001", **extra)
    loaded = torch.load(tmp_path / "model_0000001.pth", weights_only=True)
    assert (loaded["best"], loaded["count"], loaded["tuple"]) == (1.5, 3, (2.0, "x"))
    assert torch.equal(loaded["array"], torch.arange(3))


def test_plain_keeps_ordered_dicts_of_tensors():
    state = TinyModel().state_dict()
    assert plain({"model": state})["model"] is state


def test_an_object_is_kept_and_named(caplog):
    value = plain({"hooks": {"x": collections.Counter("ab"), "y": object()}})
    assert isinstance(value["hooks"]["y"], object) and "checkpoint.hooks.y" in caplog.text


def test_stock_reads_ours_and_ours_reads_stock(tmp_path):
    ours = checkpointer(tmp_path / "ours", 1)
    ours.save("model_0000001")
    stock = checkpointer(tmp_path / "ours", 2, DetectionCheckpointer)
    stock.resume_or_load("", resume=True)
    assert torch.equal(stock.model.first.weight, ours.model.first.weight)
    (tmp_path / "stock").mkdir()
    stock = checkpointer(tmp_path / "stock", 3, DetectionCheckpointer)
    stock.save("model_0000001", best=np.float64(2.0))  # as Detectron2's hooks leave them
    assert resume(tmp_path / "stock") == 3


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.mkdir, (self.command,))


@pytest.mark.parametrize("suffix", ["pkl", "pth", "pyth"])
def test_weights_that_would_run_code_are_refused_unless_trusted(tmp_path, suffix):
    marker = tmp_path / "ran"
    path = tmp_path / f"evil.{suffix}"
    content = {"__author__": "x", "model": {"first.bias": np.zeros(16, dtype=np.float32)}, "model_state": {}, "x": Evil(str(marker))}
    if suffix == "pkl":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    ours = checkpointer(tmp_path / "out")
    with pytest.raises(CheckpointError, match="evil.*--trust"):
        ours.load(str(path))
    assert not marker.exists()
    if suffix != "pyth":  # Detectron2 reads .pyth by itself, and torch refuses there
        ours.trust = True
        ours.load(str(path), checkpointables=[])
        assert marker.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("author", [{"__author__": "Detectron2"}, {}])
def test_zoo_pickles_load_without_trust(tmp_path, protocol, author):
    model = {"first.bias": np.arange(16, dtype=np.float32), "extra": np.float32(1.0) * np.ones(1, dtype=np.float32)}
    path = tmp_path / "zoo.pkl"
    path.write_bytes(pickle.dumps({"model": model, **author} if author else model, protocol=protocol))
    ours = checkpointer(tmp_path / "out")
    ours.load(str(path), checkpointables=[])
    if author:
        assert torch.equal(ours.model.first.bias, torch.arange(16.0))


def test_missing_weights_are_an_error_before_anything_else(tmp_path):
    with pytest.raises(UserError, match="MODEL.WEIGHTS = .*nowhere.pth.*does not exist"):
        check_weights(str(tmp_path / "nowhere.pth"))
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpointer(tmp_path).load(str(tmp_path / "nowhere.pth"))
    check_weights("")
    check_weights("detectron2://ImageNetPretrained/MSRA/R-50.pkl")


def test_a_failed_load_does_not_block_the_next(three):
    ours = checkpointer(three, 9)
    damage(three / "model_0000003.pth", "truncated")
    with pytest.raises(CheckpointError):
        ours.load(str(three / "model_0000003.pth"))
    ours.load(str(three / "model_0000002.pth"))
    assert ours.checkpointables["trainer"].value == 2
