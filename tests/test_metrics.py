import math

import pytest
import torch
from detectron2.utils.events import EventStorage

from d2amp_ext import StepRecord
from d2amp_ext.metrics import MetricBuffer


def record(iteration, **losses):
    losses = {name: torch.tensor(float(value)) for name, value in losses.items()}
    return StepRecord(iteration, False, None, 0, 0, losses)


@pytest.fixture
def storage():
    with EventStorage(0) as opened:
        yield opened


def values(storage, name):
    return storage.history(name).values()


def test_every_step_is_written_under_its_own_iteration(storage):
    buffer = MetricBuffer()
    for iteration in range(3):
        buffer.add(record(iteration, a=iteration, b=2), 0.5)
    assert storage.histories() == {}
    storage.iter = 2
    buffer.flush()
    assert values(storage, "total_loss") == [(2.0, 0), (3.0, 1), (4.0, 2)]
    assert values(storage, "a") == [(0.0, 0), (1.0, 1), (2.0, 2)]
    assert values(storage, "data_time") == values(storage, "rank_data_time") == [(0.5, 0), (0.5, 1), (0.5, 2)]


def test_a_single_loss_is_the_total_only_as_in_detectron2(storage):
    buffer = MetricBuffer()
    buffer.add(record(0, total_loss=3), 0.1)
    buffer.flush()
    assert values(storage, "total_loss") == [(3.0, 0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_written_and_what_is_finite_is(storage, bad):
    buffer = MetricBuffer()
    buffer.add(record(0, a=bad, b=1), 0.1)
    buffer.add(record(1), 0.1)  # a forward that raised has no losses
    buffer.flush()
    assert "a" not in storage.histories() and "total_loss" not in storage.histories()
    assert values(storage, "b") == [(1.0, 0)]


def test_flushing_twice_writes_once_and_nothing_needs_no_storage():
    buffer = MetricBuffer()
    buffer.flush()  # outside of any storage
    with EventStorage(0) as storage:
        buffer.add(record(0, a=1, b=1), 0.1, {"extra": torch.tensor(7.0)})
        buffer.flush(gather=False)
        buffer.flush()
        assert values(storage, "a") == [(1.0, 0)] and values(storage, "extra") == [(7.0, 0)]


def test_one_transfer_for_all(storage, monkeypatch):
    buffer = MetricBuffer()
    for iteration in range(5):
        buffer.add(record(iteration, a=1, b=2, c=3), 0.1)
    calls = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(self.shape) or original(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a second transfer"))
    buffer.flush()
    assert calls == [torch.Size([15])]
