"""Seconds, images and shares of the peak."""

import time

import pytest
from conftest import tiny_data
from detectron2.utils.events import EventStorage
from monitor_runs import Note, history, latest, tiny_trainer, watched

from d2amp_ext.monitor import build, speed
from d2amp_ext.monitor.speed import data_seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by 1 s whenever it is read, or as told."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1.0
            return self.now

    fake = Clock()
    monkeypatch.setattr(speed, "time", fake)
    return fake


def test_seconds_and_images_of_a_step(clock):
    trainer = watched(tiny_trainer(), images_per_step=8)
    assert latest(trainer, "speed/step_seconds") == pytest.approx(1.0, abs=0.01)
    assert latest(trainer, "speed/images_per_second") == pytest.approx(8.0, abs=0.1)


def test_evaluation_between_steps_does_not_count_and_the_first_steps_neither():
    def slow(trainer):  # behind the monitor's hooks, where evaluation is
        time.sleep(0.05)

    class Slow(type(tiny_trainer().model)):
        def forward(self, batch):
            self.calls = getattr(self, "calls", 0) + 1
            time.sleep(0.2 if self.calls <= 3 else 0.01)
            return super().forward(batch)

    trainer = watched(tiny_trainer(model=Slow()), hooks=[Note(slow)])
    for value, _ in history(trainer, "speed/step_seconds"):
        assert 0.01 < value < 0.045


def test_a_run_shorter_than_its_warm_up_is_timed_all_the_same():
    assert latest(watched(tiny_trainer(), steps=2), "speed/step_seconds") > 0


def test_waiting_for_data():
    class Waiting(list):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.02)
                yield batch

    for precision in ("fp32", "off"):
        trainer = watched(tiny_trainer(precision, data=Waiting(tiny_data(20))))
        assert [i for _, i in history(trainer, "speed/data_seconds")] == [4, 9]
        assert 0.02 <= latest(trainer, "speed/data_seconds") < 0.04


def test_only_waits_since_the_last_reading_count():
    with EventStorage(0) as storage:
        for iteration, seconds in enumerate([9, 9, 1, 3]):
            storage.put_scalar("data_time", seconds, cur_iter=iteration)
        assert data_seconds(storage, 1) == 2 and data_seconds(storage, -1) == 5.5
        assert data_seconds(storage, 3) is None
        storage.put_scalar("rank_data_time", 7, cur_iter=3)
        assert data_seconds(storage, 1) == 7  # this rank's own goes first
    assert data_seconds(EventStorage(0), -1) is None


def test_share_of_the_peak(monkeypatch, clock):
    monkeypatch.setattr(build, "peak_flops", lambda device, precision: 1e6)
    trainer = watched(tiny_trainer())
    flops = 2 * 2 * 4 * (8 * 16 + 16) + 2 * 4 * 16
    assert latest(trainer, "speed/mfu_pct") == pytest.approx(100 * flops / 1e6, rel=0.01)
