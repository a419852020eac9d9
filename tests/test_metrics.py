"""Losses of many steps reach Detectron2's EventStorage in one transfer, each under its own iteration."""

import math

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch.utils._python_dispatch import TorchDispatchMode

from d2amp_ext import StepRecord, _compat
from d2amp_ext.metrics import MetricBuffer

INF, NAN = math.inf, math.nan


def record(iteration, **losses):
    losses = {name: torch.tensor(value, dtype=torch.float32) for name, value in losses.items()}
    return StepRecord(iteration, False, None, 0, 0, losses)


def written(buffer_steps, now=9, gather=True):
    """What a storage holds after the given steps were flushed at iteration `now`: {name: [(value, iteration)]}."""
    buffer = MetricBuffer()
    for step in buffer_steps:
        buffer.add(*step)
    with EventStorage(0) as events:
        events.iter = now
        buffer.flush(gather)
        assert events.iter == now
        return {name: history.values() for name, history in events.histories().items()}


def test_each_step_under_its_own_iteration():
    steps = [(record(i, loss_a=i / 2, loss_b=1.0), 0.5 + i) for i in (3, 4, 5)]
    assert written(steps) == {
        "rank_data_time": [(3.5, 3), (4.5, 4), (5.5, 5)],
        "data_time": [(3.5, 3), (4.5, 4), (5.5, 5)],
        "total_loss": [(2.5, 3), (3.0, 4), (3.5, 5)],
        "loss_a": [(1.5, 3), (2.0, 4), (2.5, 5)],
        "loss_b": [(1.0, 3), (1.0, 4), (1.0, 5)],
    }


@pytest.mark.parametrize("losses", [{"loss_a": 0.1, "loss_b": 1.7, "loss_c": 3.3}, {"total_loss": 0.123456789}, {"loss": 2.0}])
def test_the_same_numbers_as_detectron2_bit_for_bit(losses):
    step = record(6, **losses)
    with EventStorage(6) as stock:
        SimpleTrainer.write_metrics(step.losses, 0.25, 6)
    expected = {name: history.values() for name, history in stock.histories().items()}
    assert written([(step, 0.25)]) == expected


def test_further_scalars_are_written_as_they_are():
    steps = [(record(i, loss=1.0), 0.0, {"[metric]grad_scaler": torch.tensor(2.0**i)}) for i in (1, 2)]
    assert written(steps)["[metric]grad_scaler"] == [(2.0, 1), (4.0, 2)]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_not_written(bad):
    steps = [(record(0, loss_a=1.0, loss_b=2.0), 0.0), (record(1, loss_a=bad, loss_b=2.0), 0.0), (record(2, loss_a=bad), 0.0)]
    found = written(steps)
    assert found["total_loss"] == [(3.0, 0)]
    assert found["loss_a"] == [(1.0, 0)] and found["loss_b"] == [(2.0, 0), (2.0, 1)]
    assert [iteration for _, iteration in found["data_time"]] == [0, 1, 2]


def test_opposite_infinities_make_no_total():
    assert "total_loss" not in written([(record(0, loss_a=INF, loss_b=-INF), 0.0)])


def test_a_step_whose_forward_raised_has_a_time_and_no_loss():
    found = written([(record(7), 0.5), (record(8, loss=1.0), 0.25)])
    assert found["data_time"] == [(0.5, 7), (0.25, 8)] and found["total_loss"] == [(1.0, 8)]


def test_losses_that_come_and_go():
    found = written([(record(0, loss_a=1.0, loss_b=1.0), 0.0), (record(1, loss_b=2.0, loss_c=3.0), 0.0)])
    assert found["loss_a"] == [(1.0, 0)] and found["loss_c"] == [(3.0, 1)]
    assert found["loss_b"] == [(1.0, 0), (2.0, 1)] and found["total_loss"] == [(2.0, 0), (5.0, 1)]


def test_one_transfer_for_all_and_none_before():
    class Operators(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    buffer = MetricBuffer()
    steps = [record(i, loss_a=1.0, loss_b=2.0) for i in range(20)]
    with Operators() as operators, EventStorage(0):
        for step in steps:
            buffer.add(step, 0.0)
        assert operators.names == []  # adding touches no tensor
        buffer.flush()
    assert operators.names.count("aten.stack.default") == 1
    assert not [name for name in operators.names if "_local_scalar_dense" in name or "_to_copy" in name]


def test_a_flush_empties_the_buffer():
    buffer = MetricBuffer()
    buffer.flush()  # nothing there: not even an EventStorage is needed
    with EventStorage(0) as events:
        buffer.add(record(0, loss=1.0), 0.0)
        buffer.flush()
        buffer.flush()
        assert len(events.history("total_loss").values()) == 1


def test_a_flush_that_fails_is_not_repeated_for_ever():
    buffer = MetricBuffer()
    buffer.add(record(0, loss=1.0), 0.0)
    with pytest.raises(AssertionError, match="EventStorage"):
        buffer.flush()
    buffer.flush()


# Ranks


@pytest.fixture
def two_ranks(monkeypatch):
    """Lets a test say which rows the other rank sends; returns how often ranks were gathered."""
    calls = []

    def pretend(other, main=True):
        def gather(rows):
            calls.append(rows)
            return [rows, other] if main else []

        monkeypatch.setattr(comm, "gather", gather)
        monkeypatch.setattr(comm, "is_main_process", lambda: main)
        return calls

    return pretend


def row(data_time=0.0, **losses):
    return {"losses": losses, "data_time": data_time, "scalars": {}}


def test_losses_are_averaged_over_ranks_and_the_slowest_data_time_counts(two_ranks):
    calls = two_ranks([row(0.5, loss_a=3.0, loss_b=1.0), row(0.1, loss_a=1.0, loss_b=1.0)])
    found = written([(record(i, loss_a=1.0, loss_b=2.0), 0.2) for i in (0, 1)])
    assert len(calls) == 1
    assert found["loss_a"] == [(2.0, 0), (1.0, 1)] and found["loss_b"] == [(1.5, 0), (1.5, 1)]
    assert found["total_loss"] == [(3.5, 0), (2.5, 1)]
    assert found["data_time"] == [(0.5, 0), (0.2, 1)] and found["rank_data_time"] == [(0.2, 0), (0.2, 1)]


@pytest.mark.parametrize("other", [row(loss_a=INF, loss_b=1.0), row(loss_b=1.0), row()])
def test_a_rank_without_a_finite_loss_leaves_no_infinity(two_ranks, other):
    two_ranks([other])
    found = written([(record(0, loss_a=1.0, loss_b=1.0), 0.0)])
    assert "loss_a" not in found and "total_loss" not in found


def test_other_ranks_write_their_own_data_time_only(two_ranks):
    calls = two_ranks(None, main=False)
    assert written([(record(3, loss=1.0), 0.75)]) == {"rank_data_time": [(0.75, 3)]}
    assert len(calls) == 1


@pytest.mark.parametrize("main", [True, False])
def test_a_run_that_dies_waits_for_no_other_rank(two_ranks, main):
    calls = two_ranks([row(loss=5.0)], main)
    found = written([(record(3, loss=1.0), 0.75)], gather=False)
    assert calls == [] and found["total_loss"] == [(1.0, 3)]


# An EventStorage of before April 2023


def test_an_older_event_storage_gets_the_iterations_too(monkeypatch):
    """Found: it has no `cur_iter`, and our trainer died in its first step on every Detectron2 of before April 2023."""

    class Older(EventStorage):
        def put_scalar(self, name, value, smoothing_hint=True):
            super().put_scalar(name, value, smoothing_hint)

        def put_scalars(self, *, smoothing_hint=True, **kwargs):
            for name, value in kwargs.items():
                self.put_scalar(name, value, smoothing_hint)

    monkeypatch.setitem(globals(), "EventStorage", Older)
    test_each_step_under_its_own_iteration()
    with Older(5) as events:
        with pytest.raises(ValueError):
            _compat.put_scalar(events, "x", "no number", 3)
        assert events.iter == 5
