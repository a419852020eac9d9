"""The arithmetic of a step is counted once, and counting changes nothing."""

import pytest
import torch
from conftest import TinyModel, tiny_data
from monitor_runs import history, tiny_trainer, watched
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from d2amp_ext.monitor import build
from d2amp_ext.monitor.flops import FlopCounter, FlopMeter


def test_the_same_count_as_torchs_own_counter():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(5))
    x = torch.ones(2, 3, 8, 8)
    model(x)
    counts = []
    for counter, total in ((FlopCounter(), lambda c: c.total), (FlopCounterMode(display=False), lambda c: c.get_total_flops())):
        with counter:
            model(x).sum().backward()
        counts.append(total(counter))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("precision", ["fp32", "off"])
def test_one_step_is_counted_forward_and_backward(precision):
    meter = FlopMeter()
    watched(tiny_trainer(precision), hooks=[meter])
    # Linear layers 8 -> 16 -> 1 on 4 rows: forward, gradient of the weights, and of the input of the second layer.
    forward = 2 * 4 * (8 * 16 + 16 * 1)
    assert meter.flops == 2 * forward + 2 * 4 * 16
    assert _get_current_dispatch_mode() is None


def test_a_forward_that_was_given_up_is_counted_again():
    class Raising(TinyModel):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            if self.calls in (3, 4):
                raise FloatingPointError("boxes")
            return super().forward(batch)

    meter = FlopMeter()
    watched(tiny_trainer("fp32", model=Raising()), hooks=[meter])
    assert meter.flops == 2 * 2 * 4 * (8 * 16 + 16) + 2 * 4 * 16


def test_a_step_that_fails_leaves_no_mode_behind():
    class Failing(TinyModel):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("device on fire")
            return super().forward(batch)

    with pytest.raises(RuntimeError, match="on fire"):
        watched(tiny_trainer("fp32", model=Failing()), hooks=[FlopMeter()])
    assert _get_current_dispatch_mode() is None


def test_nothing_is_counted_where_the_peak_is_not_known():
    trainer = watched(tiny_trainer())
    assert not [hook for hook in trainer._hooks if isinstance(hook, FlopMeter)]
    assert not history(trainer, "speed/mfu_pct")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "off"])
def test_a_run_that_counts_has_the_same_losses_and_random_states(precision, monkeypatch):
    class Random(TinyModel):
        def forward(self, batch):
            noise = torch.rand(4, 8)
            return super().forward([{**batch[0], "x": torch.nn.functional.dropout(batch[0]["x"] + noise)}])

    def run(peak):
        monkeypatch.setattr(build, "peak_flops", lambda device, precision: peak)
        torch.manual_seed(3)
        trainer = watched(tiny_trainer(precision, tiny_data(20), Random()))
        assert bool(history(trainer, "speed/mfu_pct")) == bool(peak)
        return history(trainer, "total_loss"), torch.get_rng_state().tolist(), trainer.model.state_dict()

    counted, plain = run(1e9), run(None)
    assert counted[:2] == plain[:2]
    assert all(torch.equal(counted[2][name], value) for name, value in plain[2].items())
