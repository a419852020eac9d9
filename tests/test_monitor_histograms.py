"""Histograms of log2 |gradient|, read back with TensorBoard's own reader, and the picture with the limits."""

import math

import numpy as np
import pytest
import torch
from conftest import tiny_data
from monitor_runs import tiny_trainer
from test_monitor_board import read, run

from d2amp_ext.monitor.gradients import BIAS, OCTAVES, count_octaves
from d2amp_ext.monitor.histograms import BF16, FP16, HEAD, SIDE, _x, histogram, limits, picture


def counts_of(*values):
    return [float(n) for n in count_octaves(torch.tensor(values))]


def test_a_histogram_by_hand():
    data = histogram(counts_of(1.0, 1.5, 0.25, -0.3, 0.0, math.inf, math.nan))
    assert data["bucket_limits"] == [-1.0, 0.0, 1.0] and data["bucket_counts"] == [2.0, 0.0, 2.0]
    assert (data["min"], data["max"], data["num"]) == (-2.0, 1.0, 4.0)
    assert data["sum"] == -2.0 and data["sum_squares"] == 2 * 1.5**2 + 2 * 0.5**2


@pytest.mark.parametrize("values", [(0.0,), (math.inf, math.nan), ()])
def test_nothing_to_show(values):
    assert histogram(counts_of(*values)) is None


def test_read_back_per_stage_at_every_reading(tmp_path):
    trainer = run(tmp_path, steps=12)
    events = read(tmp_path)
    assert sorted(events.Tags()["histograms"]) == ["gradients_log2/first", "gradients_log2/second"]
    for stage, parameters in (("first", trainer.model.first), ("second", trainer.model.second)):
        found = events.Histograms(f"gradients_log2/{stage}")
        assert [event.step for event in found] == [4, 9, 11]
        last = found[-1].histogram_value
        grads = torch.cat([p.grad.flatten() for p in parameters.parameters()]).abs()
        grads = grads[grads > 0]
        assert last.num == len(grads) and sum(last.bucket) == len(grads)
        assert last.min <= grads.min().log2() and grads.max().log2() <= last.max


def test_infinite_gradients_do_no_harm(tmp_path):
    run(tmp_path, tiny_trainer(data=tiny_data(20, spoil=(4,))), steps=10)
    events = read(tmp_path)
    assert [event.step for event in events.Histograms("gradients_log2/first")][-1] == 9
    for event in events.Histograms("gradients_log2/first"):
        assert all(map(math.isfinite, [*event.histogram_value.bucket_limit, *event.histogram_value.bucket]))


def test_pictures_become_rarer(tmp_path):
    run(tmp_path, steps=20, period=2)
    images = read(tmp_path).Images("gradients_log2/limits")
    assert [image.step for image in images] == [1, 3, 7, 15]  # readings 1, 2, 4, 8


def test_limits_move_with_the_scale():
    places = {text: place for place, text, _ in limits(2.0**10)}
    assert places == {
        "fp16: rounded to 0 below": -35,
        "fp16: fewer bits below": -24,
        "fp16: infinite above": 6,
        "bf16: fewer bits below": -126,
        "bf16: infinite above": 128,
    }


def test_limits_are_those_of_torch():
    half, brain = torch.finfo(torch.float16), torch.finfo(torch.bfloat16)
    places = {text: place for place, text, _ in limits(1.0)}
    assert places["fp16: fewer bits below"] == math.log2(half.tiny)
    assert places["fp16: infinite above"] == math.ceil(math.log2(half.max))
    assert places["fp16: rounded to 0 below"] == math.log2(half.smallest_normal) - 11
    assert places["bf16: fewer bits below"] == math.log2(brain.tiny)
    assert places["bf16: infinite above"] == math.ceil(math.log2(brain.max))


def test_the_picture_has_a_line_at_each_limit_and_bars_where_the_values_are():
    counts = [0.0] * OCTAVES
    counts[BIAS - 60], counts[0], counts[-1] = 10.0, 5.0, 3.0
    image = picture({"rpn": counts, "a_stage_with_a_rather_long_name": counts}, 256.0)
    row = image[-36]  # below the bars of the last stage
    for place, _, colour in limits(256.0):
        assert tuple(row[_x(place)]) == colour in (FP16, BF16)
    bars = (image[HEAD : HEAD + 56] == (120, 120, 120)).all(axis=2)
    columns = {int(x) for x in np.nonzero(bars)[1] if x >= SIDE}  # text is left of them
    assert columns == {_x(-60), _x(-60) + 1}


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**40, 2.0**120])
def test_the_picture_copes_with_every_scale_and_with_nothing(scale):
    image = picture({"model": [0.0] * OCTAVES}, scale)
    assert image.dtype == np.uint8 and image.shape[2] == 3
