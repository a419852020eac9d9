"""Every road in, side by side: the same recipe for 20 steps ends with the same bits."""

import json
import logging
import re

import pytest
import torch
from conftest import ROOT, lazy_sampler, stock_script
from detectron2.data import build_detection_train_loader
from detectron2.engine import default_setup
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer

from d2amp_ext import load_cfg
from d2amp_ext.cli import main
from d2amp_ext.data.register import register_datasets

STEPS = 20
YAML = ["--config-file", "quick/faster_rcnn_micro.yaml"]
LAZY = ["--config-file", "quick/faster_rcnn_micro.py"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def keys(precision, folder):
    return ["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision, "OUTPUT_DIR", folder]


def by_yaml(precision):
    assert main(["train", *YAML, *keys(precision, "yaml")]) == 0
    return torch.load("yaml/model_final.pth", weights_only=True)["model"]


def by_lazy(precision):
    opts = ["train.device=cpu", "train.amp.enabled=True", f"train.amp.precision={precision}", "train.output_dir=lazy"]
    assert main(["lazy", *LAZY, *opts, *lazy_sampler()]) == 0
    return torch.load("lazy/model_final.pth", weights_only=True)["model"]


def by_lightning(precision):
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    assert main(["lightning", *YAML, *keys(precision, "lightning")]) == 0
    return torch.load("lightning/model_final.pth", weights_only=True)["model"]


def by_run(precision):
    script = stock_script("train_net.py")
    if script is None:
        pytest.skip("this Detectron2 was installed without its tools/train_net.py")
    config = str(ROOT / "configs" / YAML[1])
    assert main(["run", script, "--config-file", config, "--num-gpus", "1", *keys(precision, "run")]) == 0
    return torch.load("run/model_final.pth", weights_only=True)["model"]


def by_hand(precision):
    """The recipe as the README prints it, with the model, data and schedule of the config around it."""
    cfg = load_cfg("quick/faster_rcnn_micro.yaml", keys(precision, "hand"))
    register_datasets(cfg)
    default_setup(cfg, args=None)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    data_loader = build_detection_train_loader(cfg)
    scheduler = build_lr_scheduler(cfg, optimizer)
    (recipe,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "= amp_step(" in block]
    assert len(recipe.strip().splitlines()) < 25
    recipe = recipe.replace('PrecisionPolicy("auto")', f'PrecisionPolicy("{precision}")').replace("range(10)", f"range({STEPS})")
    recipe = recipe.replace("        storage.step()\n", "        storage.step()\n        scheduler.step()\n")
    assert "scheduler.step()" in recipe and f"range({STEPS})" in recipe
    exec(recipe, {"model": model, "optimizer": optimizer, "data_loader": data_loader, "scheduler": scheduler})
    return model.state_dict()


ROADS = {"lazy": by_lazy, "run": by_run, "lightning": by_lightning, "hand": by_hand}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, datasets_dir):
    """The weights and losses of the YAML road, once for each precision."""
    made = {}

    def of(precision):
        if precision not in made:
            folder = tmp_path_factory.mktemp(precision)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
                made[precision] = by_yaml(precision), losses(folder / "yaml")
        return made[precision]

    return of


def losses(folder):
    """The losses of the last step in metrics.json."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    (line,) = [line for line in lines if line["iteration"] == STEPS - 1 and "total_loss" in line]
    return {name: value for name, value in line.items() if "loss" in name or name == "lr"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("road", ROADS)
def test_every_road_ends_with_the_same_bits(here, expected, road, precision):
    weights, metrics = expected(precision)
    logging.getLogger("d2amp_ext").handlers.clear()
    found = ROADS[road](precision)
    assert found.keys() == weights.keys()
    different = [name for name, value in weights.items() if not torch.equal(value, found[name])]
    assert different == []
    if road != "hand":
        assert losses(here / road) == metrics


def test_precisions_do_differ(expected):
    """Else the comparison above would compare nothing."""
    fp32, bf16 = expected("fp32")[0], expected("bf16")[0]
    assert any(not torch.equal(fp32[name], bf16[name]) for name in fp32)
