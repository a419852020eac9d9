"""What `d2amp setup` sees of a Python environment. Needs only the standard library, changes nothing.

`probe` imports torch, torchvision and Detectron2 in a process of its own, so that a broken one cannot take the set-up
down. `fingerprint` tells in milliseconds whether anything was installed or removed since. `incomplete_distributions`
finds what an installer was stopped in the middle of.
"""

import contextlib
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROBE_SECONDS = 600  # the first import from a cold, slow disk
PROBED = ("torch", "torchvision", "pkg_resources", "cv2", "detectron2")

# Runs with a bare `python -c` in the environment that is looked at. Each part is written as soon as it is known: when
# the interpreter crashes, the report still shows which import it was. The folder of the caller is taken off the path,
# since a checkout of Detectron2 that is not installed may lie there.
_PROBE_SOURCE = r"""
import importlib, importlib.metadata, importlib.util, json, os, sys, warnings
if sys.path and sys.path[0] == "":
    del sys.path[0]
warnings.simplefilter("ignore")
out = open(sys.argv[1], "a", encoding="utf-8")

def owners(module):
    found = {}
    for item in importlib.metadata.distributions():
        folder = os.path.basename(str(getattr(item, "_path", "")))
        if folder.startswith("~") or not (item.read_text("METADATA") or item.read_text("PKG-INFO")):
            continue  # what pip moved aside before it removes it
        name = item.metadata["Name"] or ""
        if name == module or module in (item.read_text("top_level.txt") or "").split():
            found.setdefault(name, item.version)
    return found

def look(name, check):
    seen = dict(found=False, ok=False, version=None, file=None, error=None, missing=None, owners=owners(name))
    def write():
        out.write(json.dumps([name, seen]) + "\n")
        out.flush()
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # not there, or a folder without Python code
            seen.update(error="it is not installed", missing=name)
            return write()
        seen.update(found=True, file=spec.origin, error="the interpreter crashed or hung while importing it")
        write()
        module = importlib.import_module(name)
        seen.update(version=getattr(module, "__version__", None))
        seen.update(check() or {})
        seen.update(ok=True, error=None)
    except BaseException as error:
        seen.update(error=f"{type(error).__name__}: {error}"[:2000], missing=getattr(error, "name", None))
        if not isinstance(error, ModuleNotFoundError):
            seen.update(missing=None)
    write()

def check_torch():
    import torch
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    return {"build": f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"}

def check_torchvision():
    import torch, torchvision
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)

def check_detectron2():
    for part in ("config", "data", "modeling", "engine", "evaluation", "checkpoint"):
        importlib.import_module("detectron2." + part)
    from detectron2.engine import HookBase
    seen = {"after_backward": hasattr(HookBase, "after_backward")}
    try:
        compiled = importlib.import_module("detectron2._C")
    except ImportError as error:
        return {"compiled_error": str(error), **seen}
    return {"compiled_error": None, "compiled_cuda": getattr(compiled, "has_cuda", bool)(), **seen}

checks = {"torch": check_torch, "torchvision": check_torchvision, "detectron2": check_detectron2}
for name in sys.argv[2:]:
    look(name, checks.get(name, dict))
"""


def probe(python=sys.executable, names=PROBED, timeout=PROBE_SECONDS):
    """Imports packages with an interpreter and reports how that went.

    Args:
        python: the interpreter to look at.
        names: import names, in this order.
        timeout: seconds for all of them.

    Returns:
        dict: name -> dict of `found`, `ok` (bool); `version`, `file`, `error`, `missing` (the module whose absence is
        the error), each str or None; `owners` (the installed distributions that bring it: name -> version). torch also
        has `build` (str), Detectron2 `compiled_error` (str or None; None: its compiled module `_C` loads),
        `compiled_cuda` (whether that one knows CUDA) and `after_backward` (whether its hooks are called there).
    """
    with tempfile.TemporaryDirectory(prefix="d2amp-setup-") as folder:
        report = Path(folder) / "probe"
        report.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [python, "-c", _PROBE_SOURCE, str(report), *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout,
            )
        seen = dict(json.loads(line) for line in report.read_text(encoding="utf-8").splitlines())
    for name in names:  # those that come after a crash
        blank = {"found": False, "ok": False, "version": None, "file": None, "missing": None, "owners": {}}
        seen.setdefault(name, {**blank, "error": "the interpreter crashed or hung before it"})
    return seen


def fingerprint():
    """A hash that changes with every package that is installed into or removed from this environment."""
    entries = []
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.endswith(".dist-info"):
                    record = os.path.join(entry.path, "RECORD")
                    entries.append((entry.path, os.stat(record).st_mtime_ns if os.path.exists(record) else 0))
    for name in PROBED:
        spec = importlib.util.find_spec(name)
        entries.append((name, spec.origin if spec else None))
    return hashlib.sha256(repr((sys.version, sorted(map(repr, entries)))).encode()).hexdigest()


def incomplete_distributions(site_dirs=None, scripts_dir=None):
    """Distributions that an installer was stopped in the middle of.

    pip writes the file INSTALLER when everything else is in place. One that lacks it (packages of a Linux distribution
    may, too) counts as complete if its commands and all files that its RECORD names, in their full size, are there.

    Args:
        site_dirs: folders to look in; None: those that pip installs this environment's packages to.
        scripts_dir: where commands lie; None: that of this environment.

    Returns:
        dict: path of the .dist-info folder -> (name, version).
    """
    if site_dirs is None:
        site_dirs = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    scripts_dir = Path(scripts_dir or sysconfig.get_path("scripts"))
    found = {}
    for folder in [path for site in site_dirs for path in Path(site).glob("*.dist-info")]:
        distribution = importlib.metadata.Distribution.at(folder)
        # A name that starts with "~" was moved aside by pip. Without METADATA, pip itself takes it for not installed.
        if folder.name.startswith("~") or not distribution.read_text("METADATA") or distribution.read_text("INSTALLER"):
            continue
        rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        commands = [entry.name for entry in distribution.entry_points if entry.group == "console_scripts"]
        whole = distribution.read_text("RECORD") and all(_is_whole(folder.parent, row) for row in rows)
        if not whole or not all(any(scripts_dir.glob(f"{name}*")) for name in commands):
            found[folder] = (distribution.metadata["Name"], distribution.version)
    return found


def _is_whole(site_dir, row):
    """Whether the file in one line of a RECORD is there in its full size; compiled Python files do not count."""
    if not row or row[0].endswith(".pyc"):
        return True
    try:
        size = (site_dir / row[0]).stat().st_size
    except OSError:
        return False
    return len(row) < 3 or not row[2] or int(row[2]) == size


def version_tuple(version):
    """(major, minor) of a version string; (0, 0) where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)
