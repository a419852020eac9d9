#!/usr/bin/env python
"""What the monitor costs: the time of steps with MONITOR.PERIOD 20 beside steps without the monitor.

Two trainers with the same weights and images run in one process, step by step in turn, so that a machine whose speed
drifts slows both. The steps of a period are added up, so that each pair of sums has one reading in it. Prints medians and
the median of the ratios of pairs, and writes them to a JSON file. On a CPU the ratio of processor time is there too, which
other programs on the machine disturb less.

    OMP_NUM_THREADS=1 python benchmarks/monitor_overhead.py
"""

import argparse
import copy
import json
import logging
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from detectron2.data import build_detection_train_loader
from detectron2.engine import TrainerBase, default_writers
from detectron2.engine.hooks import IterationTimer, PeriodicWriter
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from d2amp_ext import AMPTrainer, PrecisionPolicy, load_cfg
from d2amp_ext.data.register import register_datasets
from d2amp_ext.doctor.machine import cpu_model
from d2amp_ext.monitor import build_monitor_hooks, place

LIMIT = 1.01
PERIOD = 20


class Timed:
    """A run that makes one step at a time and remembers how long the steps of each period took, in s of the clock and of
    the processor."""

    def __init__(self, trainer, hooks):
        self.trainer = trainer
        self.seconds = []
        self.processor_seconds = []
        self.storage = trainer.storage = EventStorage(0)
        trainer.max_iter = 10**9
        trainer.register_hooks(hooks)
        with self.storage:
            trainer.before_train()

    def step(self, iteration):
        if iteration % PERIOD == 0:
            self.seconds.append(0.0)
            self.processor_seconds.append(0.0)
        seed_all_rng(iteration)  # the same proposals are sampled in both
        with self.storage:
            self.trainer.iter = iteration
            start, processor_start = time.perf_counter(), time.process_time()
            TrainerBase.before_step(self.trainer)
            self.trainer.run_step()
            TrainerBase.after_step(self.trainer)
            self.seconds[-1] += time.perf_counter() - start
            self.processor_seconds[-1] += time.process_time() - processor_start


def make_runs(cfg, folder):
    """A run without the monitor and one with it, with equal weights, batches and writers."""
    seed_all_rng(0)
    loader = iter(build_detection_train_loader(cfg))
    batches = [next(loader) for _ in range(16)]
    model = build_model(cfg)
    for name, period in (("without", 0), ("with", PERIOD)):
        own, cfg.MONITOR.PERIOD = copy.deepcopy(model), period
        policy = PrecisionPolicy("fp32")
        trainer = AMPTrainer(own, batches, build_optimizer(cfg, own), PERIOD, policy=policy)
        trainer._data_loader_iter_obj = (copy.deepcopy(batches[i % 16]) for i in range(10**9))
        writers = default_writers(str(Path(folder) / name))
        monitor = build_monitor_hooks(cfg, trainer.policy, own, trainer.optimizer, writers=writers)
        yield Timed(trainer, place(monitor, [IterationTimer(), PeriodicWriter(writers, PERIOD)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--periods", type=int, default=20, help="pairs of periods (default: %(default)s)")
    parser.add_argument("--config-file", default="quick/faster_rcnn_tiny.yaml")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", default="benchmarks/results/monitor_overhead.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cfg = load_cfg(args.config_file, ["MODEL.DEVICE", args.device])
    register_datasets(cfg)
    with tempfile.TemporaryDirectory() as folder:
        without, watched = make_runs(cfg, folder)
        for iteration in range((args.periods + 1) * PERIOD):  # the first period warms up
            for run in (without, watched) if iteration % 2 else (watched, without):
                run.step(iteration)
        for run in (without, watched):
            with run.storage:
                run.trainer.after_train()  # closes the writers
    pairs = list(zip(without.seconds[1:], watched.seconds[1:]))
    processor_pairs = list(zip(without.processor_seconds[1:], watched.processor_seconds[1:]))
    losses = [[value for value, _ in run.storage.history("total_loss").values()] for run in (without, watched)]
    result = {
        "periods": args.periods,
        "period": PERIOD,
        "config": args.config_file,
        "without_median_ms_per_step": round(1e3 * statistics.median(a for a, _ in pairs) / PERIOD, 3),
        "with_median_ms_per_step": round(1e3 * statistics.median(b for _, b in pairs) / PERIOD, 3),
        "median_ratio": round(statistics.median(b / a for a, b in pairs), 4),
        "total_ratio": round(sum(b for _, b in pairs) / sum(a for a, _ in pairs), 4),
        "median_processor_time_ratio": round(statistics.median(b / a for a, b in processor_pairs), 4),
        "limit": LIMIT,
        "losses_identical": losses[0] == losses[1] and len(losses[0]) == (args.periods + 1) * PERIOD,
        "scalars": len([name for name in watched.storage.histories() if name.startswith(("precision/", "speed/", "memory/"))]),
        "machine": {"processor": cpu_model(), "device": args.device, "torch": torch.__version__,
                    "python": platform.python_version(), "threads": 1},
    }  # fmt: skip
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.periods} periods of {PERIOD} steps of {args.config_file}, in turn, one thread")
    print(f"  without the monitor    {result['without_median_ms_per_step']:8.2f} ms per step (median)")
    print(f"  with the monitor       {result['with_median_ms_per_step']:8.2f} ms per step (median)")
    print(f"  ratio, median of pairs {result['median_ratio']:8.4f}   (limit {LIMIT})")
    print(f"  of processor time      {result['median_processor_time_ratio']:8.4f}")
    print(f"  losses identical       {result['losses_identical']}")


if __name__ == "__main__":
    main()
