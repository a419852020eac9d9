"""One transfer a period, finite values only, mean and worst over ranks."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from monitor_runs import Note, Reads, history, reads_of_steps, tiny_trainer, watched

from d2amp_ext.monitor import readout as module
from d2amp_ext.monitor.readout import Readout, over_ranks


class At:
    def __init__(self, iteration, max_iter=100):
        self.iter, self.max_iter = iteration, max_iter


@pytest.mark.parametrize("period, due", [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 5]), (4, [3, 5]), (100, [5])])
def test_due_every_period_and_at_the_end(period, due):
    assert [i for i in range(6) if Readout(period).is_due(At(i, 6))] == due


def test_a_loop_without_an_end_is_read_too():
    trainer = At(4)
    del trainer.max_iter
    assert Readout(5).is_due(trainer)


def test_everything_is_read_in_one_transfer():
    readout = Readout(1)
    readout.add([torch.tensor(3.0), torch.tensor([[1.0, 2.0]], dtype=torch.float64)], lambda v: dict(zip("abc", v)))
    readout.add([], lambda values: {"host": 7, "empty": len(values)})
    readout.add([torch.tensor(5, dtype=torch.bfloat16)], lambda v: {"d": v[0]})
    with Reads() as reads:
        assert readout.read() == {"a": 3.0, "b": 1.0, "c": 2.0, "host": 7.0, "empty": 0.0, "d": 5.0}
    assert reads.count == 1
    with Reads() as reads:
        assert readout.read() == {}  # what was read is gone
    assert reads.count == 0


def test_what_is_not_finite_is_left_out_and_the_first_of_a_name_counts():
    readout = Readout(1)
    readout.add([], lambda _: {"a": math.inf, "b": math.nan, "c": -math.inf, "d": 1})
    readout.add([], lambda _: {"a": 2, "d": 3})
    assert readout.read() == {"a": 2.0, "d": 1.0}


@pytest.mark.parametrize("precision", ["fp32", "off"])
def test_not_one_read_between_two_periods(precision):
    plain = reads_of_steps(tiny_trainer(precision), period=0)
    counted = reads_of_steps(tiny_trainer(precision), period=5)
    assert len(plain) == len(counted) == 10
    for number, (without, with_monitor) in enumerate(zip(plain, counted)):
        due = number in (4, 9)
        assert with_monitor[0] - without[0] == due, number
        if not due:
            assert with_monitor[1] == without[1], number  # not one operator either


def test_one_rank_has_no_worst():
    assert over_ranks([{"precision/grad_norm": 1.0}]) == {"precision/grad_norm": 1.0}


def test_mean_and_worst_over_ranks():
    ranks = [
        {"precision/grad_norm/rpn": 1.0, "speed/images_per_second": 10.0, "precision/fp16_headroom_log2": 3.0},
        {"precision/grad_norm/rpn": 3.0, "speed/images_per_second": 20.0},
    ]
    assert over_ranks(ranks) == {
        "precision/grad_norm/rpn": 2.0,
        "precision/grad_norm_worst/rpn": 3.0,
        "speed/images_per_second": 15.0,
        "speed/images_per_second_worst": 10.0,
        "precision/fp16_headroom_log2": 3.0,
        "precision/fp16_headroom_log2_worst": 3.0,
    }


def test_only_the_main_rank_writes(monkeypatch):
    gathered = []
    other = SimpleNamespace(gather=lambda scalars: gathered.append(scalars) or [], is_main_process=lambda: False)
    monkeypatch.setattr(module, "comm", other)
    trainer = watched(tiny_trainer())
    assert len(gathered) == 2 and "precision/grad_norm" in gathered[0]
    assert not [name for name in trainer.storage.histories() if name.startswith(("precision", "speed", "memory"))]


def test_two_ranks_are_written_with_their_worst(monkeypatch):
    two = SimpleNamespace(
        gather=lambda scalars: [scalars, {k: v + 1 for k, v in scalars.items()}], is_main_process=lambda: True
    )
    monkeypatch.setattr(module, "comm", two)
    trainer = watched(tiny_trainer())
    (mean, iteration), worst = history(trainer, "precision/grad_norm")[0], history(trainer, "precision/grad_norm_worst")[0][0]
    assert iteration == 4 and worst == pytest.approx(mean + 0.5)
    headroom, low = (history(trainer, "precision/fp16_headroom_log2" + end)[0][0] for end in ("", "_worst"))
    assert low == pytest.approx(headroom - 0.5)


def test_writers_see_single_values_not_medians():
    trainer = watched(tiny_trainer(), period=1, steps=6)
    values = history(trainer, "precision/grad_norm")
    assert len(values) == 6
    shown = trainer.storage.latest_with_smoothing_hint(20)["precision/grad_norm"]
    assert shown == values[-1]


def test_steps_keep_their_iteration_after_a_resume():
    trainer = tiny_trainer()
    watched(trainer, period=5, steps=17, start=12)
    assert [i for _, i in history(trainer, "precision/grad_norm")] == [14, 16]


def test_the_reading_is_there_for_hooks_behind_it():
    seen = []
    watched(tiny_trainer(), hooks=[Note(lambda t: seen.append("precision/grad_norm" in t.storage.histories()))])
    assert seen == [False] * 4 + [True] * 6


def test_two_real_ranks(run_tool, tmp_path):
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "d2amp_ext.cli"]
    opts = ["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "SOLVER.MAX_ITER", "4",
            "MONITOR.PERIOD", "2", "DATALOADER.NUM_WORKERS", "0", "DATASETS.TEST", "()", "OUTPUT_DIR", tmp_path]  # fmt: skip
    run_tool("torch.distributed.run", *options, "train", "--config-file", "quick/faster_rcnn_micro.yaml", *opts,
             cwd=tmp_path, check=0)  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    row = next(row for row in lines if row["iteration"] == 3)
    assert row["precision/grad_norm_worst/rpn"] == pytest.approx(row["precision/grad_norm/rpn"])  # DDP made them equal
    assert row["speed/images_per_second_worst"] <= row["speed/images_per_second"]
    assert row["memory/host_rss_gib"] <= row["memory/host_rss_gib_worst"]
