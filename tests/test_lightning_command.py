"""`d2amp lightning` and tools/lightning_train_net.py as people type them."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from d2amp_ext.cli import main

MICRO = ["--config-file", "quick/faster_rcnn_micro.yaml"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_tool):
    """Three steps and an evaluation in a process of its own, with warnings of every kind shown."""
    folder = tmp_path_factory.mktemp("trained")
    opts = ["--precision", "bf16-mixed", "SOLVER.MAX_ITER", "3", "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"]
    done = run_tool("tools/lightning_train_net.py", *MICRO, *opts, cwd=folder, check=0)
    return folder / "output", done


def test_a_run_leaves_what_people_look_for(trained):
    folder, _ = trained
    names = set(os.listdir(folder))
    assert names >= {"config.yaml", "config_stock.yaml", "log.txt", "metrics.json", "last.ckpt", "model_final.pth", "last_checkpoint"}
    assert len([name for name in names if name.startswith("events.out.tfevents")]) == 1
    assert not [name for name in names if "lightning_logs" in name] and not (folder.parent / "lightning_logs").exists()
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [2, 3] and "total_loss" in lines[0] and "bbox/AP" in lines[1]


def test_it_says_what_precision_set_and_where_everything_runs(trained):
    log = (trained[0] / "log.txt").read_text()
    assert "--precision bf16-mixed set SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION bf16" in log
    assert log.count("Precision of training: bf16 on cpu") == 1 and "Precision of evaluation: bf16 on cpu" in log
    assert "Command line arguments: Namespace(" in log


def test_no_warning_that_nobody_can_act_on(trained):
    _, done = trained
    text = done.stdout + done.stderr
    for word in ("Warning", "is deprecated", "Traceback", "Logging error", "Tip:", "TPU available", "litlogger", "weights_only", "DataLoader"):
        assert word not in text, word
    warned = [line for line in text.splitlines() if "WARNING" in line]
    assert [line for line in warned if "No CUDA device" not in line] == []


def test_train_net_evaluates_the_ckpt_with_the_same_figures(trained, here):
    folder, _ = trained
    in_training = (folder / "log.txt").read_text().split("copypaste")[-1]
    config = ["--config-file", str(folder / "config.yaml"), "--eval-only"]
    for command, name in [("train", "last.ckpt"), ("lightning", "last.ckpt"), ("lightning", "model_final.pth")]:
        output = f"{command}_{name}"
        assert main([command, *config, "MODEL.WEIGHTS", str(folder / name), "OUTPUT_DIR", output]) == 0
        assert (here / output / "log.txt").read_text().split("copypaste")[-1] == in_training


def test_resume_goes_on_and_evaluates_alone(here):
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "SOLVER.CHECKPOINT_PERIOD", "1"]
    assert main(["lightning", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "2", "DATASETS.TEST", "()"]) == 0
    log = here / "output" / "log.txt"
    assert "--resume: there is no" in log.read_text()
    assert main(["lightning", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "3", "DATASETS.TEST", "()"]) == 0
    assert "Starting training from iteration 2" in log.read_text()
    last = torch.load(here / "output" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 3 and last["lr_schedulers"][0]["last_epoch"] == 3
    assert main(["lightning", "--resume", "--eval-only", *MICRO]) == 0
    assert "copypaste" in log.read_text()
    # Nothing left to do: the figures once more, and how to go on.
    assert main(["lightning", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "3"]) == 0
    assert "Nothing to train" in log.read_text()
    # The other tool goes on from the last file, and Lightning then says so.
    assert main(["train", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "4", "DATASETS.TEST", "()"]) == 0
    assert "Starting training from iteration 3" in log.read_text()
    assert main(["lightning", "--resume", *MICRO, *opts, "SOLVER.MAX_ITER", "5"]) == 2


MISTAKES = [
    (["--precision", "fp17"], ["--precision fp17", "bf16-mixed"]),
    (["--precision", "64", "SOLVER.AMP.PRECISION", "bf16"], ["--precision 64", "SOLVER.AMP.PRECISION = 'bf16'"]),
    (["--strategy", "dpp"], ["--strategy dpp", "ddp"]),
    (["--strategy", "deepspeed", "SOLVER.AMP.ENABLED", "True"], ["--strategy deepspeed --precision", "pip install"]),
    (["--strategy", "fsdp", "SOLVER.AMP.ENABLED", "True", "SOLVER.ACCUMULATE_STEPS", "2"], ["--strategy fsdp", "ddp"]),
    (["--devices", "2", "--num-gpus", "3"], ["--devices 2 and --num-gpus 3"]),
    (["--num-nodes", "2", "--num-machines", "3"], ["--num-nodes 2 and --num-machines 3"]),
    (["--accelerator", "cpu", "--devices", "-1"], ["--num-gpus -1"]),
    (["SOLVER.AMP.PRECISON", "fp16"], ["SOLVER.AMP.PRECISON", "SOLVER.AMP.PRECISION"]),
    (["SOLVER.ACCUMULATE_STEPS", "0"], ["SOLVER.ACCUMULATE_STEPS"]),
    (["MODEL.WEIGHTS", "nowhere.ckpt"], ["MODEL.WEIGHTS", "nowhere.ckpt"]),
]


@pytest.mark.parametrize("flags, words", MISTAKES)
def test_a_mistake_is_one_clear_error_and_status_2(here, capsys, flags, words):
    assert main(["lightning", *MICRO, *flags]) == 2
    error = capsys.readouterr().err
    assert "error: " in error and "Traceback" not in error and all(word in error for word in words), error
    assert not (here / "output" / "last.ckpt").exists()


def test_a_damaged_last_ckpt(here, capsys):
    (here / "output").mkdir()
    (here / "output" / "last.ckpt").write_bytes(b"PK torn")
    assert main(["lightning", "--resume", *MICRO]) == 2
    assert "last.ckpt is damaged" in capsys.readouterr().err


def test_giving_up_is_status_1(here, capsys):
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0",
            "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "1", "SOLVER.MAX_ITER", "9"]  # fmt: skip
    assert main(["lightning", *MICRO, *opts]) == 1
    assert "MAX_CONSECUTIVE_SKIPS = 1" in capsys.readouterr().err


def test_without_lightning_it_says_what_to_type(run_tool, tmp_path):
    code = "import sys; sys.modules['lightning'] = None\nfrom d2amp_ext.cli import main\nsys.exit(main(['lightning']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and 'pip install "d2amp-ext[lightning]"' in done.stderr
    code = "import sys; sys.modules['lightning'] = None\nimport d2amp_ext.lightning as l\nl.TrainingModule"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError" in done.stderr and 'pip install "d2amp-ext[lightning]"' in done.stderr


@pytest.mark.parametrize("version", ["2.3.4", "2.7.0", "3.0"])
def test_another_version_of_lightning_is_one_error(here, capsys, monkeypatch, version):
    import lightning

    monkeypatch.setattr(lightning, "__version__", version)
    assert main(["lightning", *MICRO]) == 2
    error = capsys.readouterr().err
    assert f"found {version}" in error and ">= 2.4 and < 2.7" in error and 'pip install "d2amp-ext[lightning]"' in error


def predictions(folder):
    """Image, class, score and box of all that an evaluation found; COCOEvaluator keeps what every process found."""
    found = json.loads((folder / "inference" / "coco_instances_results.json").read_text())
    return sorted((entry["image_id"], entry["category_id"], entry["score"], entry["bbox"]) for entry in found)


def test_two_processes_train_and_evaluate_every_image_once(run_tool, here):
    opts = ["--devices", "2", "--precision", "fp32", "SOLVER.MAX_ITER", "2", "SOLVER.ACCUMULATE_STEPS", "2"]
    done = run_tool("tools/lightning_train_net.py", *MICRO, *opts, cwd=here, check=0)
    assert "broadcast_buffers" not in done.stdout + done.stderr
    output = here / "output"
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    assert "total_loss" in lines[0] and lines[0]["iteration"] == 1 and "bbox/AP" in lines[-1]
    assert (output / "log.txt.rank1").exists()
    last = torch.load(output / "last.ckpt", weights_only=True)
    assert len(last["detectron2"]["ranks"]) == 2 and last["global_step"] == 2
    # One process finds on the same weights what two find: no image was left out or shown twice.
    run_tool("tools/lightning_train_net.py", *MICRO, "--eval-only", "--devices", "2", "MODEL.WEIGHTS", output / "last.ckpt",
             "OUTPUT_DIR", "two", cwd=here, check=0)  # fmt: skip
    assert main(["train", *MICRO, "--eval-only", "MODEL.WEIGHTS", str(output / "last.ckpt"), "OUTPUT_DIR", "one"]) == 0
    one, two = (predictions(here / name) for name in ("one", "two"))
    assert one == two and len({image for image, *_ in one}) == 16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_exit_status(tmp_path, datasets_dir, number):
    command = [sys.executable, str(ROOT / "tools" / "lightning_train_net.py"), *MICRO, "SOLVER.MAX_ITER", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DETECTRON2_DATASETS": str(datasets_dir), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if " iter: " in line:
            break
    process.send_signal(number)
    process.stdout.read()
    assert process.wait(60) == 128 + number


def test_help_is_for_newcomers(capsys):
    assert main(["lightning", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--accelerator", "--devices", "--num-nodes", "--strategy", "--precision", "--eval-only", "last.ckpt", "torchrun"):
        assert word in text
