#!/usr/bin/env python
"""Looks at TensorBoard as a user does: a short run, TensorBoard, headless Chromium, one screenshot for each tab.

    python tools/tensorboard_screenshots.py                         trains a tiny detector first (about a minute)
    python tools/tensorboard_screenshots.py --logdir output         of a run that is there already

Where there is no Chromium nothing is done, and the reason is printed. Debian has it as `apt-get install chromium`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TABS = ("custom_scalars", "timeseries", "images", "histograms", "text")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 20  # that a page gets to load and draw


def find_browser():
    """The path of Chromium or Chrome, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def train(folder, opts):
    """Trains the tiny detector in `folder`, with further settings as KEY VALUE pairs."""
    base = ["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "OUTPUT_DIR", folder,
            "SOLVER.MAX_ITER", "100", "TEST.EVAL_PERIOD", "50", "MONITOR.PERIOD", "10"]  # fmt: skip
    tool = str(Path(__file__).resolve().parent / "train_net.py")
    subprocess.run([sys.executable, tool, "--config-file", "quick/faster_rcnn_micro.yaml", *base, *opts], check=True)


def serve(logdir):
    """Starts TensorBoard on a free port. Returns the process and its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", ".", "--port", "0", "--host", "127.0.0.1"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, cwd=logdir, **pipes)  # pages show the folder as it is given
    for line in server.stderr:
        if found := re.search(r"at (http://\S+)", line):
            return server, found[1]
    raise SystemExit(f"TensorBoard ended with status {server.wait()}. Type: pip install tensorboard")


def shoot(browser, address, path):
    """Saves a screenshot of a page. Raises CalledProcessError when the browser fails."""
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,1100", "--no-first-run"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")  # which Chromium asks for when it is run by root
        wait = [f"--virtual-time-budget={SECONDS * 1000}", f"--user-data-dir={profile}", f"--screenshot={path}"]
        subprocess.run([browser, *flags, *wait, address], check=True, timeout=300, capture_output=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logdir", help="folder of a run; without it a tiny one is trained")
    parser.add_argument("--output", default="screenshots", help="folder of the pictures (default: %(default)s)")
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="settings of the tiny run, KEY VALUE ...")
    args = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(f"Skipped: none of {', '.join(BROWSERS)} is on the PATH. Debian and Ubuntu: apt-get install chromium")
        return
    output = Path(args.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.logdir is None:
            train(folder, args.opts)
        server, address = serve(args.logdir or folder)
        try:
            for tab in TABS:
                shoot(browser, f"{address}#{tab}", output / f"tensorboard_{tab}.png")
                print(output / f"tensorboard_{tab}.png")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
