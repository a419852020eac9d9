"""`d2amp train` and tools/train_net.py, as people type them: the main road, and every mistake on it."""

import json
import os

import pytest
import torch
from conftest import ROOT

from d2amp_ext.cli import main

MICRO = ["--config-file", "quick/faster_rcnn_micro.yaml"]
SHORT = ["SOLVER.MAX_ITER", "3", "SEED", "1"]


def lines_of(folder):
    text = (folder / "metrics.json").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_tool):
    """A run of tools/train_net.py in a process of its own: three steps with AMP in bf16 and evaluation in fp16."""
    folder = tmp_path_factory.mktemp("trained")
    opts = ["SOLVER.AMP.ENABLED", "true", "SOLVER.AMP.PRECISION", "bfloat16", "TEST.AMP.ENABLED", "True",
            "TEST.AMP.PRECISION", "bf16"]  # fmt: skip
    done = run_tool("tools/train_net.py", *MICRO, *opts, *SHORT, cwd=folder, check=0)
    return folder / "output", done


def test_a_run_leaves_what_people_look_for(trained):
    folder, _ = trained
    names = set(os.listdir(folder))
    assert names >= {"config.yaml", "config_stock.yaml", "log.txt", "metrics.json", "model_final.pth", "last_checkpoint"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    lines = lines_of(folder)
    assert any("total_loss" in line for line in lines) and lines[0]["iteration"] == 2


def test_the_log_names_both_precisions_and_why(trained):
    log = (trained[0] / "log.txt").read_text()
    assert "Precision of training: bf16 on cpu (as configured)" in log
    assert "Precision of evaluation: bf16 on cpu (as configured)" in log
    if not torch.cuda.is_available():
        assert "No CUDA device: this run uses MODEL.DEVICE cpu" in log


def test_nothing_noisy_is_printed(trained):
    _, done = trained
    for word in ("FutureWarning", "DeprecationWarning", "Traceback", "lr_scheduler.step()"):
        assert word not in done.stdout + done.stderr


def test_evaluation_alone_gives_the_figures_of_training(trained, here, capsys):
    folder, _ = trained
    config = ["--config-file", str(folder / "config.yaml"), "--eval-only"]
    assert main(["train", *config, "MODEL.WEIGHTS", str(folder / "model_final.pth"), "OUTPUT_DIR", "eval"]) == 0
    in_training = (folder / "log.txt").read_text().split("copypaste")[-1]
    alone = (here / "eval" / "log.txt").read_text().split("copypaste")[-1]
    assert alone == in_training and "AP" in (here / "eval" / "log.txt").read_text()


def test_resume_goes_on(trained, here):
    opts = ["SOLVER.CHECKPOINT_PERIOD", "2", "SEED", "1", "MONITOR.PERIOD", "1", "TEST.EVAL_PERIOD", "0"]
    assert main(["train", *MICRO, *opts, "SOLVER.MAX_ITER", "2"]) == 0
    assert main(["train", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "4"]) == 0
    assert "Starting training from iteration 2" in (here / "output" / "log.txt").read_text()
    assert torch.load(here / "output" / "model_final.pth", weights_only=True)["iteration"] == 3


def test_resume_with_nothing_there_starts(here):
    assert main(["train", "--resume", *MICRO, "SOLVER.MAX_ITER", "1", "TEST.EVAL_PERIOD", "0"]) == 0


@pytest.mark.parametrize("spelt, name", [("auto", "auto: "), ("16", "fp16"), ("16-mixed", "fp16"), ("tf32", "tf32"), ("fp32", "fp32")])
def test_every_spelling_runs_and_is_named(here, spelt, name):
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", spelt, "SOLVER.MAX_ITER", "1", "DATASETS.TEST", "()"]
    assert main(["train", *MICRO, *opts]) == 0
    line = next(line for line in (here / "output" / "log.txt").read_text().splitlines() if "Precision of training" in line)
    assert name in line and "cpu" in line
    lines_of(here / "output")


ARTICLE = "MODEL:\n  MASK_ON: False\nSOLVER\n  IMS_PER_BATCH: 16\n  AMP\n    ENABLED: True\n"

MISTAKES = [
    (["SOLVER.AMP.PRECISON", "fp16"], ["SOLVER.AMP.PRECISON", "SOLVER.AMP.PRECISION"]),
    (["SOLVER.AMP.PRECISION", "fp17"], ["SOLVER.AMP.PRECISION", "fp17", "bf16"]),
    (["SOLVER.AMP.ENABLED", "perhaps"], ["SOLVER.AMP.ENABLED", "perhaps"]),
    (["SOLVER.MAX_ITER", "0"], ["SOLVER.MAX_ITER = 0"]),
    (["SOLVER.MAX_ITER", "ten"], ["SOLVER.MAX_ITER", "ten", "int"]),
    (["SOLVER.IMS_PER_BATCH", "0"], ["SOLVER.IMS_PER_BATCH = 0"]),
    (["SOLVER.BASE_LR", "0"], ["SOLVER.BASE_LR"]),
    (["MODEL.ROI_HEADS.NUM_CLASSES", "0"], ["MODEL.ROI_HEADS.NUM_CLASSES", "0", "3"]),
    (["MODEL.ROI_HEADS.NUM_CLASSES", "7"], ["MODEL.ROI_HEADS.NUM_CLASSES", "7", "3"]),
    (["MODEL.WEIGHTS", "nowhere.pth"], ["MODEL.WEIGHTS", "nowhere.pth"]),
    (["DATASETS.TRAIN", "('d2amp_shapes_trian',)"], ["d2amp_shapes_trian", "d2amp_shapes_train"]),
    (["DATASETS.TRAIN", "()"], ["DATASETS.TRAIN"]),
    (["DATASETS.REGISTER", "x=coco:nowhere.json:images"], ["DATASETS.REGISTER", "nowhere.json"]),
    (["SOLVER.ACCUMULATE_STEPS", "2", "SOLVER.AMP.ENABLED", "False"], ["SOLVER.ACCUMULATE_STEPS", "ENABLED True"]),
    (["SOLVER.MAX_ITER"], ["SOLVER.MAX_ITER", "KEY VALUE"]),
    (["SOLVER.OPTIMIZER", "LION"], ["SOLVER.OPTIMIZER", "LION", "ADAMW"]),
]


def assert_mistake(capsys, status, words):
    error = capsys.readouterr().err
    assert status == 2
    assert "error: " in error and "Traceback" not in error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("opts, words", MISTAKES)
def test_a_mistake_is_one_clear_error_and_status_2(here, capsys, opts, words):
    assert_mistake(capsys, main(["train", *MICRO, *opts]), words)
    assert not (here / "output" / "model_final.pth").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        (None, ["cfg.yaml", "does not exist"]),
        ("", ["cfg.yaml", "empty"]),
        (ARTICLE, ["Line 3, `SOLVER`", "Line 5, `AMP`"]),
        ("OUTPUT_DIR: !!python/object/apply:os.mkdir ['ran']\n", ["line 1", "--trust"]),
    ],
)
def test_a_config_that_cannot_be_used(here, capsys, text, words):
    if text is not None:
        (here / "cfg.yaml").write_text(text)
    assert_mistake(capsys, main(["train", "--config-file", "cfg.yaml"]), words)
    assert not (here / "ran").exists()


def test_a_precision_that_the_device_cannot_do(here, capsys, monkeypatch):
    from d2amp_ext import _compat

    monkeypatch.setattr(_compat, "native_precisions", lambda *args: (frozenset(), frozenset()))
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16"]
    assert_mistake(capsys, main(["train", *MICRO, *opts]), ["SOLVER.AMP.PRECISION", "bf16", "Choose fp32"])


def test_an_output_folder_that_cannot_be_written(here, capsys):
    (here / "file").write_text("in the way")
    assert_mistake(capsys, main(["train", *MICRO, "OUTPUT_DIR", "file/output"]), ["OUTPUT_DIR", "file"])


def test_hostile_weights(here, capsys):
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.mkdir, ("ran",))

    (here / "evil.pkl").write_bytes(pickle.dumps({"model": {}, "x": Evil()}))
    assert_mistake(capsys, main(["train", *MICRO, "MODEL.WEIGHTS", "evil.pkl"]), ["evil.pkl", "--trust"])
    assert not (here / "ran").exists()


def test_a_torn_last_checkpoint_falls_back(here, capsys):
    opts = [*MICRO, "SOLVER.CHECKPOINT_PERIOD", "1", "SOLVER.MAX_ITER", "2", "DATASETS.TEST", "()"]
    assert main(["train", *opts]) == 0
    final = here / "output" / "model_final.pth"
    final.write_bytes(final.read_bytes()[:5000])
    assert main(["train", "--resume", *opts[:-4], "SOLVER.MAX_ITER", "3", "DATASETS.TEST", "()"]) == 0
    log = (here / "output" / "log.txt").read_text()
    assert "model_final.pth is damaged" in log and "Resumed from the older checkpoint" in log


def test_debug_shows_the_traceback_too(here, capsys):
    assert main(["train", "--debug", *MICRO, "SOLVER.MAX_ITER", "0"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "error: SOLVER.MAX_ITER = 0" in error


def test_giving_up_is_status_1(here, capsys):
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0",
            "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "1", "SOLVER.MAX_ITER", "9"]  # fmt: skip
    assert main(["train", *MICRO, *opts]) == 1
    error = capsys.readouterr().err
    assert "MAX_CONSECUTIVE_SKIPS = 1" in error and "SOLVER.BASE_LR" in error


def test_help_is_for_newcomers(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--config-file", "--resume", "--eval-only", "--num-gpus", "--trust", "SOLVER.AMP.PRECISION bf16", "torchrun"):
        assert word in text


def test_the_tool_is_thin():
    for script in (ROOT / "tools").glob("*.py"):
        assert len(script.read_text().splitlines()) < 90
