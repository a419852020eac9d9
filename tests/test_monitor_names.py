"""The names that a run writes are those of the table, of docs/monitor.md, and none that the console would mistake."""

import re

import pytest
from conftest import ROOT
from monitor_runs import tiny_trainer, watched

from d2amp_ext.monitor.names import PER_STAGE, SCALARS, WORST, base_of

ELSEWHERE = {"memory/peak_allocated_gib", "memory/reserved_gib", "memory/oom_retries", "speed/mfu_pct"}  # need a GPU
HOST = {"memory/host_rss_gib", "memory/host_peak_rss_gib"}
WITH_AMP = {"precision/grad_scale", "precision/skipped_steps", "precision/consecutive_skips", "precision/skip_rate_pct",
            "precision/retried_steps"}  # fmt: skip


def written(trainer):
    return {name for name in trainer.storage.histories() if name.startswith(("precision/", "speed/", "memory/"))}


@pytest.mark.parametrize("precision, lacking", [("fp32", set()), ("off", WITH_AMP)])
def test_a_run_writes_the_names_of_the_table(precision, lacking):
    names = written(watched(tiny_trainer(precision)))
    assert {base_of(name) for name in names} | HOST == set(SCALARS) - ELSEWHERE - lacking
    assert {base_of(name) for name in names if name.count("/") == 2} == set(PER_STAGE)


def test_no_name_is_taken_for_a_loss_or_a_metric_by_the_console():
    for name in SCALARS:
        assert "loss" not in name and "[metric]" not in name and not name.endswith(WORST)


def test_the_documentation_has_the_same_names():
    rows = re.findall(r"^\| `([a-z0-9_]+/[a-z0-9_]+)` \|(.*)\|$", (ROOT / "docs/monitor.md").read_text(), re.M)
    assert [name for name, _ in rows] == list(SCALARS)
    for name, rest in rows:
        cells = [cell.strip() for cell in rest.split("|")]
        assert len(cells) == 3 and all(cells), name
        assert ("per stage" in cells[0]) == (name in PER_STAGE), name


@pytest.mark.parametrize(
    "name, base",
    [("speed/step_seconds", "speed/step_seconds"), ("precision/grad_norm/roi_box", "precision/grad_norm")],
)
def test_base_of(name, base):
    assert base_of(name) == base
