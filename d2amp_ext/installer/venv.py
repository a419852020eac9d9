"""Makes a virtual environment that keeps the torch of the interpreter it is made with. Standard library only."""

import site
import subprocess
import sys
from pathlib import Path

from .._compat import MIN_TORCH
from ..errors import UserError
from .environment import NEW, CommandFailed, lock_file
from .probe import probe, version_tuple


def make_venv(folder):
    """Makes a virtual environment, in place of one that is there.

    If this interpreter imports torch >= the oldest supported and a torchvision that goes with it, the new environment
    sees this interpreter's packages; else it starts empty.

    Args:
        folder: where; it must be new, empty or a virtual environment.

    Raises:
        UserError: the folder holds something else.
        CommandFailed: the environment could not be made.
    """
    folder = Path(folder)
    if not (folder / "pyvenv.cfg").is_file() and any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--make-venv: {folder} holds files and is not a virtual environment; name another folder")
    seen = probe(names=("torch", "torchvision"))
    keeps = all(found["ok"] for found in seen.values()) and version_tuple(seen["torch"]["version"]) >= MIN_TORCH
    if keeps:
        print(f"{folder} will use torch {seen['torch']['version']} of {sys.executable}.", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", *(["--system-site-packages"] if keeps else []), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        raise CommandFailed(command, done.returncode, done.stdout)
    if keeps and sys.prefix != sys.base_prefix:
        _inherit(folder)
    lock_file(folder).write_text(NEW, encoding="utf-8")


def _inherit(folder):
    """Lets an environment see the packages of the virtual environment that runs this.

    `--system-site-packages` reaches only the interpreter that both were made from.
    """
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    purelib = subprocess.run([str(python), "-c", query], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in site.getsitepackages()]
    (Path(purelib) / "d2amp_parent.pth").write_text("".join(lines), encoding="utf-8")
