"""TensorBoard made ready, read back with TensorBoard's own reader."""

import os
import re

import pytest
import torch
from conftest import tiny_data
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import CommonMetricPrinter, TensorboardXWriter
from monitor_runs import policy_of, tiny_trainer, watched
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from d2amp_ext import PrecisionPolicy, __version__
from d2amp_ext.monitor import board
from d2amp_ext.monitor.board import Board, environment_text, layout, precision_text
from d2amp_ext.monitor.names import SCALARS


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0, "histograms": 0})
    return accumulator.Reload()


def run(folder, trainer=None, steps=10, start=0, period=5, **options):
    writer = TensorboardXWriter(str(folder))
    hooks = [PeriodicWriter([writer], period=period)]
    return watched(trainer or tiny_trainer(), period, steps, hooks, start, writers=[writer], **options)


def text_of(events, tag):
    (event,) = events.Tensors(f"{tag}/text_summary")
    return event.step, event.tensor_proto.string_val[0].decode()


def test_layout_texts_and_scalars(tmp_path):
    run(tmp_path, texts={"run/coverage": "| operator | dtype |"})
    events = read(tmp_path)
    assert [(e.step, e.value > 0) for e in events.Scalars("precision/grad_norm/first")] == [(4, True), (9, True)]
    (event,) = events.Tensors("custom_scalars__config__")
    found = layout_pb2.Layout()
    found.ParseFromString(event.tensor_proto.string_val[0])
    assert [category.title for category in found.category] == ["Precision", "Speed", "Memory"]
    assert not any(category.closed for category in found.category)
    step, text = text_of(events, "run/precision")
    assert step == 0 and "| precision | fp32 |" in text and "no gradient scaler" in text
    assert f"| torch | {torch.__version__} |" in text_of(events, "run/environment")[1]
    assert text_of(events, "run/coverage")[1] == "| operator | dtype |"


def test_every_scalar_is_in_one_chart_with_its_stages_and_its_worst():
    patterns = [tag for charts in layout().values() for kind, tags in charts.values() for tag in tags]
    assert {kind for charts in layout().values() for kind, _ in charts.values()} == {"Multiline"}
    for name in SCALARS:
        for shown in (name, f"{name}/roi_box", f"{name}_worst", f"{name}_worst/roi_box"):
            assert sum(bool(re.match(pattern, shown)) for pattern in patterns) == 1, shown


def test_the_files_are_closed(tmp_path):
    run(tmp_path)
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [path for path in open_files if "tfevents" in path]
    assert len(list(tmp_path.glob("*tfevents*"))) == 1


def test_a_resumed_run_goes_on_at_its_iteration_and_takes_back_what_it_writes_anew(tmp_path):
    run(tmp_path, steps=20)
    run(tmp_path, steps=20, start=10)
    events = read(tmp_path)
    for tag in ("precision/grad_norm", "total_loss"):
        assert [e.step for e in events.Scalars(tag)] == [4, 9, 14, 19]
    assert [e.step for e in events.Histograms("gradients_log2/first")] == [4, 9, 14, 19]
    assert [e.step for e in events.Tensors("run/precision/text_summary")] == [0, 10]


def test_a_first_run_takes_nothing_back(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    Board([writer]).start_at(0)
    assert "purge_step" not in writer._writer_args


def test_the_users_own_purge_step_stays(tmp_path):
    writer = TensorboardXWriter(str(tmp_path), purge_step=3)
    Board([writer]).start_at(10)
    assert writer._writer_args["purge_step"] == 3


def test_a_writer_that_is_open_already_stays(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    writer._writer
    Board([writer]).start_at(10)
    assert "purge_step" not in writer._writer_args
    writer.close()


def test_an_older_detectron2_opens_its_file_at_once(tmp_path):
    class Older(TensorboardXWriter):
        def __init__(self):
            self._writer = "summary"

    own = Board([Older()])
    own.start_at(10)
    assert own.summary == "summary"


def test_a_run_without_tensorboard(tmp_path):
    assert Board([CommonMetricPrinter(10)]).summary is None
    watched(tiny_trainer(data=tiny_data(20)), writers=[CommonMetricPrinter(10)])


def test_a_run_without_amp_has_a_board(tmp_path):
    run(tmp_path, tiny_trainer("off"))
    events = read(tmp_path)
    assert "off" in text_of(events, "run/precision")[1]
    assert len(events.Histograms("gradients_log2/second")) == 2


@pytest.mark.parametrize(
    "policy, lines",
    [
        (PrecisionPolicy("bf16"), ["| precision | bf16 |", "| gradient scaler | none, this precision needs none |"]),
        (PrecisionPolicy("fp16"), ["dynamic from 65536 to no less than 1, times 2 after 2000 good updates, times 0.5"]),
        (PrecisionPolicy("off"), ["AMP is disabled"]),
    ],
)
def test_text_of_the_precision(policy, lines):
    text = precision_text(policy.resolve("cpu"))
    for line in lines:
        assert line in text


def test_a_fixed_scale_is_named():
    scaler = policy_of(tiny_trainer()).scaler.__class__(static=128.0)
    text = precision_text(PrecisionPolicy("fp16", scaler=scaler).resolve("cpu"))
    assert "| gradient scaler | fixed at 128 |" in text


def test_text_of_the_environment(monkeypatch):
    monkeypatch.setattr(board.sys, "argv", ["train_net.py", "a|b"])
    text = environment_text(torch.device("cpu"))
    assert "| command | train_net.py a\\|b |" in text and "| processes | 1 |" in text and "CUDA" not in text
    assert f"| d2amp-ext | {__version__} |" in text
    rows = text.splitlines()
    assert rows[1] == "|---|---|" and all(row.startswith("| ") and row.endswith(" |") for row in rows[2:])
