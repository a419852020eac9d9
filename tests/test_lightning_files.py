"""Lightning's checkpoints where there is no Lightning."""

import os

import pytest
import torch
from conftest import TinyModel

from d2amp_ext import PrecisionCheckpointer, UserError
from d2amp_ext.lightning_files import without_prefix


def weights(prefix="model."):
    return {prefix + name: value for name, value in TinyModel(seed=7).state_dict().items()}


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_weights_of_a_ckpt_are_loaded(tmp_path, prefix):
    path = tmp_path / "any.ckpt"
    torch.save({"state_dict": weights(prefix), "global_step": 8, "pytorch-lightning_version": "2.6.6"}, path)
    model = TinyModel()
    rest = PrecisionCheckpointer(model).load(str(path))
    assert all(torch.equal(value, weights("")[name]) for name, value in model.state_dict().items())
    assert rest["iteration"] == 7


def test_a_ckpt_of_another_project_is_one_of_detectron2s_or_bare_weights():
    content = {"model": weights(""), "iteration": 3}
    assert without_prefix(content) is content
    assert set(without_prefix(weights(""))["model"]) == set(weights(""))


def test_a_hostile_ckpt_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"state_dict": weights(), "x": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="--trust"):
        PrecisionCheckpointer(TinyModel()).load(str(tmp_path / "evil.ckpt"))
    assert not (tmp_path / "ran").exists()


def write(folder, *names):
    """Files, each a second newer than the one before."""
    for number, name in enumerate(names):
        torch.save({"model": weights(""), "state_dict": weights()}, folder / name)
        os.utime(folder / name, (1000 + number, 1000 + number))
    return PrecisionCheckpointer(TinyModel(), str(folder))


@pytest.mark.parametrize("names", [["last.ckpt"], ["model_0000003.pth", "last.ckpt"], ["model_final.pth", "last.ckpt"]])
def test_train_net_says_that_lightning_goes_on_from_here(tmp_path, names):
    checkpointer = write(tmp_path, *names)
    with pytest.raises(UserError, match="last.ckpt, which d2amp lightning .*MODEL.WEIGHTS .*last.ckpt"):
        checkpointer.resume_or_load("", resume=True)
    checkpointer.resume_or_load("", resume=False)


@pytest.mark.parametrize("names", [["last.ckpt", "model_final.pth"], ["last.ckpt", "model_0000003.pth"], []])
def test_train_net_goes_on_from_its_own(tmp_path, names):
    checkpointer = write(tmp_path, *names)
    checkpointer.resume_or_load("", resume=True)


@pytest.mark.parametrize(
    "names, refused",
    [
        (["model_0000003.pth"], True),
        (["model_final.pth"], True),
        (["last.ckpt", "model_0000003.pth"], True),
        (["last.ckpt", "model_final.pth"], False),  # as a Lightning run leaves them
        (["model_0000003.pth", "last.ckpt"], False),
        ([], False),
    ],
)
def test_lightning_says_that_train_net_goes_on_from_here(tmp_path, names, refused):
    from d2amp_ext.lightning_files import check_tool

    candidates = write(tmp_path, *names).resume_candidates()
    if not refused:
        check_tool(str(tmp_path), candidates, lightning=True)
        return
    with pytest.raises(UserError, match=r"which d2amp train .*MODEL.WEIGHTS .*model_"):
        check_tool(str(tmp_path), candidates, lightning=True)
