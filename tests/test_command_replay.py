"""`d2amp replay`, as people type it: a run goes wrong, and its bundle is made again, here and elsewhere."""

import json
import os
import re
import shutil

import pytest
import torch

from d2amp_ext.cli import main
from d2amp_ext.numerics.bundle import read_bundle

MICRO = ["--config-file", "quick/faster_rcnn_micro.yaml", "MODEL.DEVICE", "cpu", "SEED", "1", "SOLVER.MAX_ITER", "4",
         "SOLVER.AMP.ENABLED", "True", "SOLVER.CHECKPOINT_PERIOD", "1", "SOLVER.WARMUP_ITERS", "0"]  # fmt: skip
# Weights that grow until a forward pass overflows; the third update is the first that is not finite.
DIVERGE = ["SOLVER.BASE_LR", "1e6", "SOLVER.AMP.PRECISION", "bf16", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "0"]


@pytest.fixture(scope="module")
def gone_wrong(tmp_path_factory, run_tool):
    """A run that gave up, with the weights in its bundle."""
    folder = tmp_path_factory.mktemp("gone_wrong")
    done = run_tool("tools/train_net.py", *MICRO, *DIVERGE, "SOLVER.AMP.BUNDLE_WEIGHTS", "True", cwd=folder, check=1)
    (name,) = os.listdir(folder / "output" / "nonfinite")
    return folder / "output" / "nonfinite" / name, done.stdout + done.stderr


def replay(capsys, *args):
    """(exit status, stdout as text or the JSON in it, stderr)."""
    capsys.readouterr()
    status = main(["replay", *map(str, args)])
    out, err = capsys.readouterr()
    return status, json.loads(out, parse_constant=pytest.fail) if "--json" in args else out, err


def test_the_message_that_ended_the_run_and_the_bundle_agree(gone_wrong):
    path, log = gone_wrong
    bundle = read_bundle(path)
    (message,) = re.findall(r"^error: (Training stopped .*)$", log, re.M)
    assert bundle["finding"]["description"] in message and f"d2amp replay ./output/nonfinite/{path.name}" in message
    place = bundle["finding"]["forward"]
    assert f"{place['module']} ({place['cls']})" in message and place["dtype"] == "bfloat16" and place["largest"] > 1e20
    for sample in bundle["batches"][0]:
        assert sample["file_name"] in message and sample["instances"].gt_boxes.tensor.shape[1] == 4
    assert "Learning rate 1e+06" in message and "Try SOLVER.AMP.PRECISION fp32" in message


def test_it_is_made_again(gone_wrong, here, capsys):
    path, _ = gone_wrong
    recorded = read_bundle(path)["finding"]
    status, result, _ = replay(capsys, path, "--json")
    assert status == 3 and result["weights"] == "the bundle" and result["replayed"]["precision"] == "bf16"
    finding = result["replayed"]["finding"]
    assert finding["forward"] == recorded["forward"] and finding["description"] == result["recorded"]["finding"]
    status, text, _ = replay(capsys, path)
    assert status == 3 and f"Replayed: {finding['description']}" in text
    assert re.search(r"precision +bf16 +bf16\n", text) and "Recorded: " in text


def test_on_another_machine_in_another_precision(gone_wrong, here, capsys, monkeypatch):
    """Nothing of the old place is there: not the output folder, not the data, not the weights it started from."""
    path, _ = gone_wrong
    shutil.copy(path, here / "sent.pth")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(here / "no data"))
    for precision in ("fp32", "fp16"):
        status, result, _ = replay(capsys, "sent.pth", "--precision", precision, "--json")
        assert result["replayed"]["precision"] == precision and status == (3 if result["replayed"]["finding"]["found"] else 0)
    assert status == 3 and result["replayed"]["finding"]["forward"]["dtype"] == "float16"
    assert result["replayed"]["scale"] == 65536.0 and "FP32_MODULES" in result["replayed"]["advice"]
    assert os.listdir(here) == ["sent.pth"]


@pytest.fixture(scope="module")
def one_bad_batch(tmp_path_factory, run_tool):
    """A run with a NaN pixel in one image, from a script of a user's own, that goes on; its last checkpoint is there."""
    folder = tmp_path_factory.mktemp("one_bad_batch")
    (folder / "their.py").write_text(
        "import sys, torch\n"
        "from d2amp_ext import PrecisionTrainer, load_cfg\n"
        "class Trainer(PrecisionTrainer):\n"
        "    @classmethod\n"
        "    def build_train_loader(cls, cfg):\n"
        "        for number, batch in enumerate(super().build_train_loader(cfg)):\n"
        "            if number == 1:\n"
        "                batch[1]['image'] = batch[1]['image'].float()\n"
        "                batch[1]['image'][0, 3, 5] = float('nan')\n"
        "            yield batch\n"
        "trainer = Trainer(load_cfg(sys.argv[2], sys.argv[3:]))\n"
        "trainer.resume_or_load()\n"
        "trainer.train()\n"
    )
    opts = [*MICRO, "SOLVER.AMP.PRECISION", "bf16", "OUTPUT_DIR", "out", "TEST.EVAL_PERIOD", "0", "DATASETS.TEST", "()"]
    done = run_tool(str(folder / "their.py"), *opts, cwd=folder, check=0)
    (name,) = os.listdir(folder / "out" / "nonfinite")
    return folder / "out" / "nonfinite" / name, done.stdout + done.stderr


def test_a_nan_pixel_in_a_run(one_bad_batch):
    path, log = one_bad_batch
    file = read_bundle(path)["batches"][0][1]["file_name"]
    assert f"Inputs that are not finite: {file}: image" in log and path.name == "iteration_0000001_rank0.pth"


def test_the_last_checkpoint_of_the_run_is_found_beside_it(one_bad_batch, here, capsys):
    path, _ = one_bad_batch
    status, result, err = replay(capsys, path, "--json")
    assert status == 3 and result["weights"] == str(path.parent.parent / "model_final.pth") and "may differ" in err
    assert result["replayed"]["finding"]["inputs"] == list(read_bundle(path)["finding"]["inputs"])


def test_weights_that_are_named(one_bad_batch, here, capsys):
    path, _ = one_bad_batch
    shutil.copy(path, here / "sent.pth")
    status, _, err = replay(capsys, "sent.pth")
    assert status == 2 and "--weights" in err and "BUNDLE_WEIGHTS" in err
    weights = path.parent.parent / "model_0000000.pth"
    status, result, _ = replay(capsys, "--json", "sent.pth", "--weights", weights)
    assert status == 3 and result["weights"] == str(weights)
    status, _, err = replay(capsys, "sent.pth", "--weights", "nowhere.pth")
    assert status == 2 and "nowhere.pth does not exist" in err


def healthy(path, target):
    """A bundle whose batch was put right."""
    content = torch.load(path, weights_only=True)
    torch.save(mended(content), target)


def mended(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.nan_to_num()
    if isinstance(value, dict):
        return {name: mended(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(mended, value))
    return value


def test_exit_status_0_when_all_is_finite(one_bad_batch, here, capsys):
    path, _ = one_bad_batch
    healthy(path, "healthy.pth")
    weights = path.parent.parent / "model_0000000.pth"  # those of the step itself
    status, text, _ = replay(capsys, "healthy.pth", "--weights", weights)
    assert status == 0 and "Replayed: Everything was finite" in text and re.search(r"loss_cls +\S+ +\d\.\d+\n", text)
    status, text, _ = replay(capsys, "healthy.pth", "SOLVER.AMP.FP32_MODULES", "('backbone.*',)", "--weights", weights,
                             "--precision", "half")  # fmt: skip
    assert status == 0 and re.search(r"precision +bf16 +fp16", text)


@pytest.mark.parametrize("args, message", [
    (["BUNDLE", "--precision", "fp8"], "--precision = 'fp8'"),
    (["BUNDLE", "SOLVER.AMP.PRECISON", "fp16"], "Did you mean SOLVER.AMP.PRECISION"),
    (["BUNDLE", "SOLVER.AMP.FP32_MODULES", "('nothing.*',)"], "matches no module"),
    (["BUNDLE", "--config-file", "nowhere.yaml"], "nowhere.yaml does not exist"),
    (["BUNDLE", "--config-file", "quick/retinanet_micro.yaml"], "do not fit the model"),
    (["BUNDLE", "MODEL.META_ARCHITECTURE", "Theirs"], "cannot be built here"),
    (["nowhere.pth"], "does not exist"),
    (["text.pth"], "cannot be read"),
])  # fmt: skip
def test_mistakes(gone_wrong, here, capsys, args, message):
    (here / "text.pth").write_text("no bundle")
    status, _, err = replay(capsys, *[gone_wrong[0] if arg == "BUNDLE" else arg for arg in args])
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and message in errors[0]


def changed(path, target, **fields):
    torch.save({**torch.load(path, weights_only=True), **fields}, target)
    return target


@pytest.mark.parametrize("fields, message", [
    ({"config": ""}, "--config-file"),
    ({"config": "MODEL: !!python/object/apply:os.system ['touch hostile-was-here']"}, "could run Python code"),
    ({"config": "just words"}, "must hold `KEY: value` lines"),
    ({"config": "MODEL: 3"}, "MODEL"),
    ({"config": "SOLVER: {AMP: {NONFINITE: never}}"}, "nonfinite"),
    ({"random": {"python": [3, [1, 2], None]}}, "random state is none"),
    ({"config_kind": "lazy"}, "--config-file CFG.py, or pass --trust"),
    ({"weights": {"backbone": 3}}, "do not fit the model"),
])  # fmt: skip
def test_bundles_that_were_tampered_with(gone_wrong, here, capsys, fields, message):
    status, _, err = replay(capsys, changed(gone_wrong[0], "bad.pth", **fields))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and message in errors[0] and not os.path.exists("hostile-was-here")


def test_keys_that_are_unknown_here_are_no_obstacle(gone_wrong, here, capsys):
    """Another version of Detectron2, or a key of a project that its model does not need."""
    text = read_bundle(gone_wrong[0])["config"] + "THEIRS:\n  KEY: 3\nOTHER: [1, 2]\n"
    assert replay(capsys, changed(gone_wrong[0], "newer.pth", config=text))[0] == 3


def test_a_run_from_a_lazyconfig(here, capsys):
    lazy = ["--config-file", "quick/faster_rcnn_micro.py", "train.device=cpu", "train.max_iter=3", "train.amp.enabled=True",
            "train.amp.precision=bf16", "train.amp.bundle_weights=True", "train.amp.nonfinite=raise", "optimizer.lr=1e6",
            "lr_multiplier.warmup_length=0.0", "train.output_dir=out"]  # fmt: skip
    assert main(["lazy", *lazy]) == 1
    (name,) = os.listdir("out/nonfinite")
    path = f"out/nonfinite/{name}"
    recorded = read_bundle(path)["finding"]["forward"]
    assert replay(capsys, path)[0] == 2
    for args in (["--trust"], ["--config-file", "quick/faster_rcnn_micro.py", "train.device=cpu"]):
        status, result, _ = replay(capsys, path, "--json", *args)
        assert status == 3 and result["replayed"]["finding"]["forward"] == recorded
