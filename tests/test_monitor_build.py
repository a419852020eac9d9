"""The monitor on the way of YAML configs: on, off, without AMP, and never in the way of the numbers."""

import json
import random

import numpy as np
import pytest
import torch
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.engine.hooks import PeriodicWriter

from d2amp_ext import PrecisionTrainer, load_cfg
from d2amp_ext.monitor import build_monitor_hooks, place, writers_of

STEPS = 6


def config(folder, *opts):
    base = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), "SOLVER.MAX_ITER", str(STEPS), "SEED", "1",
            "DATALOADER.NUM_WORKERS", "0", "TEST.EVAL_PERIOD", "0", "DATASETS.TEST", "()"]  # fmt: skip
    return load_cfg("quick/faster_rcnn_micro.yaml", [*base, *opts])


@pytest.fixture(scope="module")
def rows(tmp_path_factory, datasets_dir):
    """A function that trains and returns (rows of metrics.json by iteration, final weights, random states)."""
    from detectron2.utils.env import seed_all_rng

    done = {}

    def run(precision, period, trainer=PrecisionTrainer):
        key = precision, period, trainer
        if key not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
                folder = tmp_path_factory.mktemp("run")
                amp = [] if precision == "off" else ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision]
                cfg = config(folder, *amp, "MONITOR.PERIOD", str(period))
                if trainer is DefaultTrainer:
                    from d2amp_ext.data.register import register_datasets

                    register_datasets(cfg)
                seed_all_rng(1)
                run = trainer(cfg)
                run.train()
                states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
                text = (folder / "metrics.json").read_text()
                done[key] = [json.loads(line) for line in text.splitlines()], run, states
        return done[key]

    return run


def ours(row):
    return {name: value for name, value in row.items() if name.startswith(("precision/", "speed/", "memory/"))}


def test_figures_per_stage_reach_metrics_json(rows):
    row = rows("fp32", 3)[0][-1]
    for stage in ("backbone", "fpn", "rpn", "roi_box"):
        for name in ("grad_norm", "underflow_pct", "update_to_weight_log2", "fp16_headroom_log2"):
            assert f"precision/{name}/{stage}" in row
    assert row["precision/grad_scale"] == 1 and row["speed/images_per_second"] > 0
    assert not [name for name in ours(row) if "loss" in name]


def test_a_period_of_0_turns_it_off_and_the_numbers_stay(rows):
    watched, off = rows("fp32", 3), rows("fp32", 0)
    assert ours(watched[0][-1]) and not ours(off[0][-1])
    assert "total_loss" in off[0][-1] and off[0][-1]["total_loss"] == watched[0][-1]["total_loss"]
    assert not [hook for hook in off[1]._hooks if type(hook).__module__.startswith("d2amp_ext.monitor")]
    for one, two in zip(watched[1].model.state_dict().values(), off[1].model.state_dict().values()):
        assert torch.equal(one, two)
    assert torch.equal(watched[2][0], off[2][0]) and watched[2][1:] == off[2][1:]


def test_without_amp_the_losses_are_those_of_detectron2_and_the_figures_are_there(rows):
    ours_, stock = rows("off", 3), rows("off", 3, DefaultTrainer)
    names = [name for name in stock[0][-1] if "loss" in name]
    assert len(names) > 3 and all(ours_[0][-1][name] == stock[0][-1][name] for name in names)
    figures = ours(ours_[0][-1])
    assert figures["precision/grad_norm"] > 0 and "precision/update_to_weight_log2/rpn" in figures
    assert "precision/grad_scale" not in figures and "precision/skipped_steps" not in figures
    assert not ours(stock[0][-1])
    for one, two in zip(ours_[1].model.state_dict().values(), stock[1].model.state_dict().values()):
        assert torch.equal(one, two)


def test_without_amp_hooks_of_others_are_told_no_more_than_in_detectron2(tmp_path, datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    calls = []

    class Telling(HookBase):
        def after_backward(self):
            calls.append(self.trainer.iter)

    trainer = PrecisionTrainer(config(tmp_path, "SOLVER.MAX_ITER", "2"))
    trainer.register_hooks([Telling()])
    trainer.train()
    assert calls == []


def test_hooks_are_placed_in_front_of_all_others(rows):
    names = [type(hook).__name__ for hook in rows("fp32", 3)[1]._hooks]
    assert names.index("WriteReadout") < names.index("IterationTimer") < names.index("PeriodicWriter")
    assert names[-1] == "PeriodicWriter"


def test_nothing_to_build_for_a_period_of_0(tmp_path):
    assert build_monitor_hooks(config(tmp_path, "MONITOR.PERIOD", "0"), None, None, None) == []


def test_writers_and_places():
    class Writer:
        pass

    one, two = HookBase(), PeriodicWriter([])
    two._writers = [Writer]
    assert writers_of([one, two]) == [Writer] and writers_of([one]) == []
    late = HookBase()
    late.late = True
    assert place([late, "m"], [one, two, one]) == ["m", one, late, two, one]
    assert place(["m", late], [one]) == ["m", one, late]


def test_a_lazyconfig_run_has_the_same_figures(run_tool, tmp_path):
    amp = ["train.amp.enabled=True", "train.amp.precision=fp32", "train.monitor.period=2", "train.max_iter=4"]
    run_tool("d2amp_ext.cli", "lazy", "--config-file", "quick/faster_rcnn_micro.py", "train.device=cpu",
             f"train.output_dir={tmp_path}/out", *amp, cwd=tmp_path, check=0)  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.json").read_text().splitlines()]
    row = next(row for row in lines if row["iteration"] == 3)
    assert row["precision/grad_norm/roi_box"] > 0 and row["speed/images_per_second"] > 0
    assert list((tmp_path / "out").glob("events*"))
