"""Memory, of the GPU where there is one, else of this process."""

import builtins
import resource

import pytest
import torch
from monitor_runs import latest, tiny_trainer, watched

from d2amp_ext.monitor import memory


def test_a_run_on_a_cpu_tells_of_the_host():
    resident = latest(watched(tiny_trainer()), "memory/host_rss_gib")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    assert 0.05 < resident <= peak * 1.01


def test_the_figure_follows_what_is_taken():
    before = memory.host_memory()["memory/host_rss_gib"]
    block = bytearray(200 * 2**20)
    assert memory.host_memory()["memory/host_rss_gib"] - before == pytest.approx(200 / 1024, abs=0.05)
    del block


def test_without_proc_it_is_the_peak_and_says_so(monkeypatch):
    def closed(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", closed)
    (name, value), = memory.host_memory().items()
    assert name == "memory/host_peak_rss_gib" and value > 0.05


def test_figures_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2})
    expected = {"memory/peak_allocated_gib": 3, "memory/reserved_gib": 4, "memory/oom_retries": 2}
    assert memory.cuda_memory(torch.device("cuda")) == expected
