"""The tool that looks at TensorBoard in a browser: with a stand-in for the browser, and with a real one where it is."""

import importlib.util
import os
import stat
import urllib.request

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("screenshots", ROOT / "tools/tensorboard_screenshots.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture
def logdir(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("precision/grad_norm", 1.0, 3)
    return tmp_path / "run"


def test_without_a_browser_it_says_so_and_does_nothing(run_tool, tmp_path):
    done = run_tool("tools/tensorboard_screenshots.py", cwd=tmp_path, env={"PATH": str(tmp_path)}, check=0)
    assert done.stdout.startswith("Skipped: none of chromium") and "apt-get install chromium" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_screenshot_of_every_tab(run_tool, tmp_path, logdir):
    browser = tmp_path / "bin" / "chromium"
    browser.parent.mkdir()
    browser.write_text('#!/bin/sh\nfor a in "$@"; do case $a in --screenshot=*) echo "$@" > "${a#--screenshot=}";; esac; done\n')
    browser.chmod(browser.stat().st_mode | stat.S_IEXEC)
    path = os.pathsep.join([str(browser.parent), os.environ["PATH"]])
    done = run_tool("tools/tensorboard_screenshots.py", "--logdir", logdir, "--output", "shots", cwd=tmp_path,
                    env={"PATH": path}, check=0)  # fmt: skip
    shots = sorted(path.name for path in (tmp_path / "shots").iterdir())
    assert shots == sorted(f"tensorboard_{tab}.png" for tab in tool.TABS)
    assert all(name in done.stdout for name in shots)
    arguments = (tmp_path / "shots" / "tensorboard_text.png").read_text().split()
    assert arguments[-1].startswith("http://127.0.0.1:") and arguments[-1].endswith("/#text")


def test_tensorboard_is_served(logdir):
    server, address = tool.serve(logdir)
    try:
        page = urllib.request.urlopen(address + "data/environment", timeout=60).read()
    finally:
        server.terminate()
        server.wait()
    assert b"data_location" in page


@pytest.mark.skipif(tool.find_browser() is None, reason="needs Chromium or Chrome on the PATH")
def test_a_real_browser_draws_the_page(logdir, tmp_path):
    from PIL import Image

    server, address = tool.serve(logdir)
    try:
        tool.shoot(tool.find_browser(), f"{address}#scalars", tmp_path / "page.png")
    finally:
        server.terminate()
        server.wait()
    with Image.open(tmp_path / "page.png") as image:
        assert image.size == (1600, 1100)
        orange = sum(count for count, (r, g, b) in image.convert("RGB").getcolors(2**24) if r > 230 and 80 < g < 140 and b < 30)
    assert orange > 50_000  # TensorBoard's bar at the top
