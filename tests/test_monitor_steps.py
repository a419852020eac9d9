"""What a StepRecord says reaches the storage, in the step that is read."""

import pytest
from conftest import tiny_data
from monitor_runs import Note, history, latest, tiny_trainer, watched

from d2amp_ext.monitor import steps


def test_skips_are_counted_in_the_step_that_is_read():
    trainer = watched(tiny_trainer(data=tiny_data(20, spoil=(1, 3, 4))), period=5, steps=10)
    assert history(trainer, "precision/skipped_steps") == [(3, 4), (3, 9)]
    assert history(trainer, "precision/consecutive_skips") == [(2, 4), (0, 9)]
    assert history(trainer, "precision/skip_rate_pct") == [(60, 4), (30, 9)]


def test_the_rate_is_that_of_recent_steps(monkeypatch):
    monkeypatch.setattr(steps, "WINDOW", 5)
    trainer = watched(tiny_trainer(data=tiny_data(20, spoil=(0, 1, 2))), period=5, steps=10)
    assert history(trainer, "precision/skip_rate_pct") == [(60, 4), (0, 9)]
    assert latest(trainer, "precision/skipped_steps") == 3


def test_scale_and_norm_are_those_of_the_record():
    records = []
    data = tiny_data(20, spoil=(1,))
    trainer = watched(tiny_trainer("fp16", data, scale=1024.0), period=1, steps=4, hooks=[Note(lambda t: records.append(t.last_step))])
    assert [v for v, _ in history(trainer, "precision/grad_scale")] == [1024, 1024, 512, 512]
    expected = [(record.grad_norm.item(), record.iteration) for record in records if not record.skipped]
    assert history(trainer, "precision/grad_norm") == expected and len(expected) == 3


def test_without_amp_there_is_no_scale_and_no_skip():
    trainer = watched(tiny_trainer("off"))
    assert latest(trainer, "precision/grad_norm") > 0
    assert not history(trainer, "precision/grad_scale") and not history(trainer, "precision/skipped_steps")


@pytest.mark.parametrize("period", [3, 7])
def test_the_last_step_is_always_read(period):
    trainer = watched(tiny_trainer(), period=period, steps=10)
    assert history(trainer, "precision/grad_scale")[-1][1] == 9
