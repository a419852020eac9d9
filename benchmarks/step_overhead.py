#!/usr/bin/env python
"""What a step of AMPTrainer in fp32 costs beside one of Detectron2's SimpleTrainer.

Both train the same tiny Faster R-CNN from the same weights on the same images in memory, step by step in turn in one
process, so that a machine whose speed drifts slows both. Prints the medians and the median of the ratios of pairs, and
writes them to a JSON file.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py
"""

import argparse
import copy
import json
import logging
import platform
import statistics
import time
from pathlib import Path

import torch
from detectron2.data import build_detection_train_loader
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from d2amp_ext import AMPTrainer, PrecisionPolicy, load_cfg
from d2amp_ext.data.register import register_datasets
from d2amp_ext.doctor.machine import cpu_model

LIMIT = 1.02


class Timed:
    """A trainer that makes one step at a time and remembers how long each took."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.seconds = []
        self.losses = []
        self.storage = EventStorage(0)

    def step(self, iteration):
        seed_all_rng(iteration)  # the same proposals are sampled in both
        with self.storage:
            self.trainer.iter = self.storage.iter = iteration
            start = time.perf_counter()
            self.trainer.run_step()
            self.seconds.append(time.perf_counter() - start)


def make_trainers(cfg):
    """A SimpleTrainer and an AMPTrainer in fp32 with equal weights and equal batches."""
    seed_all_rng(0)
    loader = iter(build_detection_train_loader(cfg))
    batches = [next(loader) for _ in range(16)]
    model = build_model(cfg)
    trainers = []
    for make in (SimpleTrainer, lambda *args: AMPTrainer(*args, 20, policy=PrecisionPolicy("fp32"))):
        own = copy.deepcopy(model)
        trainer = make(own, batches, build_optimizer(cfg, own))
        trainer._data_loader_iter_obj = (copy.deepcopy(batches[i % 16]) for i in range(10**9))
        trainers.append(Timed(trainer))
    return trainers


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--config-file", default="quick/faster_rcnn_tiny.yaml")
    parser.add_argument("--output", default="benchmarks/results/step_overhead.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cfg = load_cfg(args.config_file, ["MODEL.DEVICE", "cpu"])
    register_datasets(cfg)
    stock, ours = make_trainers(cfg)
    for iteration in range(-5, args.steps):  # the first steps warm up
        pair = [stock, ours] if iteration % 2 else [ours, stock]
        for timed in pair:
            timed.step(max(iteration, 0) if iteration >= 0 else 0)
    seconds = [timed.seconds[5:] for timed in (stock, ours)]
    for timed in (stock, ours):
        with timed.storage:
            getattr(timed.trainer, "flush_metrics", bool)()
    losses = [[value for value, _ in timed.storage.history("total_loss").values()] for timed in (stock, ours)]
    common = min(map(len, losses))
    result = {
        "steps": args.steps,
        "config": args.config_file,
        "stock_median_ms": round(1e3 * statistics.median(seconds[0]), 3),
        "ours_median_ms": round(1e3 * statistics.median(seconds[1]), 3),
        "median_ratio": round(statistics.median(b / a for a, b in zip(*seconds)), 4),
        "total_ratio": round(sum(seconds[1]) / sum(seconds[0]), 4),
        "limit": LIMIT,
        "losses_identical": losses[0][:common] == losses[1][:common] and common > 0,
        "machine": {"processor": cpu_model(), "torch": torch.__version__, "python": platform.python_version(), "threads": 1},
    }
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.steps} steps of {args.config_file}, in turn, one thread")
    print(f"  SimpleTrainer          {result['stock_median_ms']:8.2f} ms (median)")
    print(f"  AMPTrainer, fp32       {result['ours_median_ms']:8.2f} ms (median)")
    print(f"  ratio, median of pairs {result['median_ratio']:8.4f}   (limit {LIMIT})")
    print(f"  losses identical       {result['losses_identical']}")


if __name__ == "__main__":
    main()
