#!/usr/bin/env python
"""Whether 16 bit costs accuracy: one recipe, several seeds, each precision from the same starts.

Trains the recipe once for each seed and precision, each in a process of its own, and compares the AP of 16 bit with the
spread of the fp32 seeds. Writes a JSON file, a plot of the losses laid over each other, and the raw curves.

    OMP_NUM_THREADS=1 python benchmarks/parity.py --precisions fp32 bf16
    OMP_NUM_THREADS=1 python benchmarks/parity.py --precisions fp32 fp16 SOLVER.MAX_ITER 100 --output results/short.json
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from d2amp_ext.doctor.machine import cpu_model

HERE = Path(__file__).resolve().parent
CONFIG = "nuclei/faster_rcnn_R_50_FPN_narrow.yaml"
COLOURS = {"fp32": "0.4", "tf32": "tab:green", "bf16": "tab:blue", "fp16": "tab:orange"}


def train(config, precision, seed, folder, opts):
    """AP, AP50 and the loss curve of one run."""
    keys = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision, "SEED", str(seed), "OUTPUT_DIR", str(folder)]
    command = [sys.executable, "-m", "d2amp_ext.cli", "train", "--config-file", config, *keys, *opts]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nexit {done.returncode}\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    curve = [(line["iteration"], line["total_loss"]) for line in lines if "total_loss" in line]
    last = [line for line in lines if "bbox/AP" in line][-1]
    skips = [line.get("precision/skipped_steps", 0) for line in lines]
    return {"precision": precision, "seed": seed, "AP": last["bbox/AP"], "AP50": last["bbox/AP50"], "losses": curve,
            "skipped_steps": max(skips, default=0)}  # fmt: skip


def compare(runs, precisions):
    """Mean and spread of each precision, and whether its mean lies within the spread of the fp32 seeds."""
    of = {precision: [run["AP"] for run in runs if run["precision"] == precision] for precision in precisions}
    reference = of["fp32"]
    margin = max(reference) - min(reference)
    table = {}
    for precision, values in of.items():
        mean = statistics.mean(values)
        inside = min(reference) - margin / 2 <= mean <= max(reference) + margin / 2
        table[precision] = {"mean": round(mean, 2), "min": round(min(values), 2), "max": round(max(values), 2), "within": inside}
    return table


def plot(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    named = set()
    for run in runs:
        label = None if run["precision"] in named else run["precision"]
        named.add(run["precision"])
        axes.plot(*zip(*run["losses"]), color=COLOURS[run["precision"]], alpha=0.7, linewidth=1, label=label)
    axes.set_xlabel("iteration (updates)")
    axes.set_ylabel("total loss (median of 20 updates)")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config-file", default=CONFIG)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"], choices=list(COLOURS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "parity.json")
    args, opts = parser.parse_known_args()
    if "fp32" not in args.precisions:
        parser.error("--precisions needs fp32, with which the others are compared")
    runs = []
    for seed in args.seeds:
        for precision in args.precisions:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(train(args.config_file, precision, seed, Path(folder), opts))
            print(f"seed {seed} {precision}: AP {runs[-1]['AP']:.2f}  AP50 {runs[-1]['AP50']:.2f}", flush=True)
    report = {
        "config": args.config_file,
        "overrides": opts,
        "AP": compare(runs, args.precisions),
        "machine": {"processor": cpu_model(), "torch": version("torch"), "python": platform.python_version(), "threads": 1},
        "runs": runs,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    plot(runs, args.output.with_suffix(".png"))
    for precision, row in report["AP"].items():
        print(f"{precision}: AP {row['mean']} ({row['min']} to {row['max']}), within the spread of fp32: {row['within']}")
    return not all(row["within"] for row in report["AP"].values())


if __name__ == "__main__":
    sys.exit(main())
