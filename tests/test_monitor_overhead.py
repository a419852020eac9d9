"""The measurement of what the monitor costs runs, and its committed result keeps the limit."""

import json
import logging
import runpy
import sys

from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "monitor_overhead.py"
RESULT = ROOT / "benchmarks" / "results" / "monitor_overhead.json"


def test_the_committed_result_keeps_the_limit():
    result = json.loads(RESULT.read_text())
    assert result["median_ratio"] <= result["limit"] == 1.01
    assert result["losses_identical"] and result["period"] == 20 and result["periods"] >= 10 and result["scalars"] > 30
    assert set(result["machine"]) == {"processor", "device", "torch", "python", "threads"}


def test_the_measurement_runs(tmp_path, datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    argv = ["--periods", "1", "--config-file", "quick/faster_rcnn_micro.yaml", "--output", str(tmp_path / "results.json")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *argv])
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        logging.disable(logging.NOTSET)
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["losses_identical"] and result["median_ratio"] < 2
    assert list(tmp_path.iterdir()) == [tmp_path / "results.json"]
