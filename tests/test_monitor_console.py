"""The line of the console ends with precision, scale and skips."""

import logging

import pytest
from conftest import tiny_data
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import CommonMetricPrinter
from monitor_runs import tiny_trainer, watched

from d2amp_ext.monitor.console import Console, ConsoleNote, short


class Printer(CommonMetricPrinter):
    """A project's own."""


def lines(caplog, precision, period=5, printer=Printer, data=None, **options):
    printer = printer(10)
    trainer = tiny_trainer(precision, data=data, **options)
    with caplog.at_level(logging.INFO, "detectron2.utils.events"):
        watched(trainer, period, writers=[printer], hooks=[PeriodicWriter([printer], period=5)])
    return [r.getMessage() for r in caplog.records if "iter: " in r.getMessage()]


@pytest.mark.parametrize("printer", [CommonMetricPrinter, Printer])
def test_precision_scale_and_skips(caplog, printer):
    first, last = lines(caplog, "fp16", data=tiny_data(20, spoil=(1,)), printer=printer, scale=2.0**12)
    assert first.endswith("  fp16  scale: 2^11  skips: 1") and "total_loss" in first and "lr: " in first
    assert last.endswith("  fp16  scale: 2^11  skips: 1")


def test_other_precisions(caplog):
    assert lines(caplog, "bf16")[-1].endswith("  bf16  scale: 1  skips: 0")


def test_before_the_first_reading_there_is_no_scale(caplog):
    assert lines(caplog, "bf16", period=7)[0].endswith("  bf16  skips: 0")


def test_without_amp_the_line_is_detectron2s(caplog):
    assert all(line.rstrip().endswith("lr: N/A") for line in lines(caplog, "off"))


def test_the_note_is_short():
    class Trainer:
        class storage:
            @staticmethod
            def histories():
                return {"precision/grad_scale": type("History", (), {"latest": lambda self: 12345.678})()}

        class last_step:
            skips = 9_999_999

    console = Console(tiny_trainer("fp16").policy, [])
    console.trainer = Trainer
    assert console.note() == "fp16  scale: 1.23e+04  skips: 9999999"
    assert len(console.note()) < 40


@pytest.mark.parametrize("scale, text", [(65536, "2^16"), (1, "1"), (0.5, "0.5"), (1000, "1e+03"), (2.0**24, "2^24")])
def test_short(scale, text):
    assert short(scale) == text


def test_a_second_run_of_the_same_printer_has_one_note():
    printer = CommonMetricPrinter(10)
    for _ in range(2):
        watched(tiny_trainer(), writers=[printer])
    assert isinstance(printer.logger, ConsoleNote) and not isinstance(printer.logger.logger, ConsoleNote)
