"""Figures of gradients, against values worked out by hand and against what fp16 really does."""

import json
import math

import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import JSONWriter
from monitor_runs import Note, history, latest, tiny_trainer, watched
from torch import nn

from d2amp_ext.monitor import gradients
from d2amp_ext.monitor.gradients import count_octaves, count_sorted, flushed, measure, summarize

OCTAVES, BIAS = gradients.OCTAVES, gradients.BIAS


def figures(values, scale=1.0, dtype=torch.float32):
    """The scalars of one parameter whose gradient has these values."""
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    vector = measure([parameter]).tolist()
    scalars = summarize(vector[:OCTAVES], vector[OCTAVES], vector[OCTAVES + 1 :], scale)
    return {name.split("/")[1]: value for name, value in scalars.items()}


def test_octaves():
    counts = count_octaves(torch.tensor([1.0, 1.99, -1.5, 2.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-126]))
    found = {i - BIAS: n for i, n in enumerate(counts.tolist()) if n}
    assert found == {0: 3, 1: 1, -BIAS: 2, 128: 3, -126: 1}
    assert counts.sum() == 10


def test_the_other_ways_to_count():
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.rand(5000, generator=generator) * 200 - 100) * torch.randn(5000, generator=generator).sign()
    exponents = values.clone().view(torch.int32).bitwise_right_shift(23).bitwise_and(255)
    counts = count_octaves(values.clone())
    assert torch.equal(count_sorted(exponents), counts) and counts.sum() == 5000
    assert torch.equal(torch.histc(exponents.float(), OCTAVES, 0, OCTAVES - 1).int(), counts)  # as on a GPU


def test_figures_by_hand():
    found = figures([3.0, -4.0, 0.0, 0.0])
    assert found["grad_norm"] == pytest.approx(5.0)
    assert found["fp16_headroom_log2"] == pytest.approx(math.log2(65504 / 4))
    assert found["zero_gradient_pct"] == 50 and found["underflow_pct"] == 0 and found["nonfinite_gradients"] == 0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_underflow_is_what_fp16_does(scale):
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.rand(20000, generator=generator) * 50 - 45)
    gone = ((values * scale).half() == 0).float().mean().item()
    assert figures(values.tolist(), scale)["underflow_pct"] == pytest.approx(100 * gone, abs=1e-3)
    assert 0 < gone < 1


def test_underflow_at_a_scale_between_powers_of_two():
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.rand(20000, generator=generator) * 50 - 45)
    gone = ((values * 1000.0).half() == 0).float().mean().item()
    assert figures(values.tolist(), 1000.0)["underflow_pct"] == pytest.approx(100 * gone, abs=0.5)


def test_headroom_says_at_which_scale_fp16_overflows():
    headroom = figures([0.5, 0.1])["fp16_headroom_log2"]
    assert torch.tensor(0.5 * 2 ** (headroom - 0.01)).half().isfinite()
    assert torch.tensor(0.5 * 2 ** (headroom + 0.01)).half().isinf()
    assert figures([0.5, 0.1], 1024.0)["fp16_headroom_log2"] == pytest.approx(headroom - 10)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_a_count(bad):
    found = figures([1.0, bad, 0.0, 1e-30])
    assert found == {"nonfinite_gradients": 1, "zero_gradient_pct": 25, "underflow_pct": 50}


def test_all_zero():
    assert figures([0.0, 0.0]) == {"nonfinite_gradients": 0, "zero_gradient_pct": 100, "underflow_pct": 0, "grad_norm": 0}


def test_a_norm_that_overflows_is_left_out_and_no_count():
    found = figures([3e30, 4e30])
    assert found["grad_norm"] == math.inf and found["nonfinite_gradients"] == 0  # a Readout leaves it out
    assert found["fp16_headroom_log2"] == pytest.approx(math.log2(65504 / 4e30))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types(dtype):
    found = figures([0.5, -2.0, 0.0], dtype=dtype)
    assert found["grad_norm"] == pytest.approx(math.hypot(0.5, 2), rel=1e-3)
    assert found["fp16_headroom_log2"] == pytest.approx(math.log2(65504 / 2))


def test_large_parameters_go_in_pieces(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(n)) for n in (7, 25, 3, 10)]
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    whole = measure(parameters)
    monkeypatch.setattr(gradients, "CHUNK", 10)
    sizes = [sum(piece.numel() for piece in chunk) for chunk in gradients._chunks([p.grad for p in parameters])]
    assert max(sizes) <= 10 and sum(sizes) == 45
    parts = measure(parameters)
    assert torch.equal(parts[: OCTAVES + 1], whole[: OCTAVES + 1]) and len(parts) == OCTAVES + 1 + len(sizes)
    assert parts[OCTAVES + 1 :].norm() == pytest.approx(whole[-1].item())


def test_sparse_and_empty_gradients_and_none():
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    empty, without = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))
    empty.grad = torch.zeros(0)
    vector = measure([table.weight, empty, without])
    assert vector.numel() == OCTAVES + 2 and vector[OCTAVES] == 2 and vector[-1] == pytest.approx(math.sqrt(4 * 5))
    assert measure([empty, without]) is None and measure([]) is None


def test_flushed_takes_whole_octaves_and_parts():
    counts = [0.0] * OCTAVES
    counts[BIAS - 26] = 8.0
    assert [flushed(counts, scale) for scale in (1.0, 2.0, 2**0.5, 0.5)] == [8.0, 0.0, pytest.approx(4.0), 8.0]


def test_stages_and_total_agree_with_torch():
    seen = {}

    def look(trainer):
        for name, parameter in trainer.model.named_parameters():
            seen.setdefault(trainer.iter, {})[name] = parameter.grad.clone()

    trainer = watched(tiny_trainer("fp32"), period=5, steps=10, hooks=[Note(look, "after_backward")])
    for iteration in (4, 9):
        grads = seen[iteration]
        for stage in ("first", "second", None):
            parts = [g.flatten() for name, g in grads.items() if stage is None or name.startswith(stage)]
            name = "precision/grad_norm" + (f"/{stage}" if stage else "")
            value = dict((i, v) for v, i in history(trainer, name))[iteration]
            assert value == pytest.approx(torch.cat(parts).norm().item(), rel=1e-5)


def test_a_scaled_run_tells_of_true_gradients_and_of_the_scaled_peak():
    plain = watched(tiny_trainer("fp32"), period=1, steps=1)
    half = watched(tiny_trainer("fp16", scale=256.0), period=1, steps=1)
    assert latest(half, "precision/grad_scale") == 256
    assert latest(half, "precision/grad_norm") == pytest.approx(latest(plain, "precision/grad_norm"), rel=0.01)
    difference = latest(plain, "precision/fp16_headroom_log2") - latest(half, "precision/fp16_headroom_log2")
    assert difference == pytest.approx(8, abs=0.05)


def test_an_infinite_gradient_leaves_metrics_json_whole(tmp_path):
    trainer = tiny_trainer("fp32", data=tiny_data(20, spoil=(4,)))
    path = tmp_path / "metrics.json"
    watched(trainer, period=5, steps=10, hooks=[PeriodicWriter([JSONWriter(str(path))], period=5)])

    def refuse(text):
        raise AssertionError(text)

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    spoilt, good = [row for row in rows if "precision/skipped_steps" in row]
    assert 100 < spoilt["precision/nonfinite_gradients"] <= sum(p.numel() for p in TinyModel().parameters())
    assert spoilt["precision/skipped_steps"] == 1 and "precision/grad_norm" not in spoilt
    assert good["precision/nonfinite_gradients"] == 0 and good["precision/grad_norm"] > 0
    assert good["precision/skip_rate_pct"] == 10 and good["precision/consecutive_skips"] == 0


def test_no_backward_no_figures():
    class Raising(TinyModel):
        def forward(self, batch):
            raise FloatingPointError("boxes")

    trainer = watched(tiny_trainer("fp32", model=Raising()), period=2, steps=2)
    assert latest(trainer, "precision/skipped_steps") == 2
    assert not history(trainer, "precision/underflow_pct")
