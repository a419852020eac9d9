"""`d2amp run`: somebody's own training script, unedited, with this package in place of Detectron2's precision."""

import argparse
import ast
import importlib.util
import logging
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

from ..errors import UserError

EXAMPLES = """
Everything after SCRIPT belongs to the script. It runs as `python SCRIPT ...` would run it, and its config knows the
keys of docs/keys.md. Nothing changes until it says SOLVER.AMP.ENABLED True (LazyConfig: train.amp.enabled=True).

examples:
  Detectron2's own script, or any with a DefaultTrainer, in bf16
    %(prog)s train_net.py --config-file cfg.yaml SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION bf16
  a LazyConfig script
    %(prog)s lazyconfig_train_net.py --config-file cfg.py train.amp.enabled=True train.amp.precision=bf16
  several processes, as the script starts them; the same under torchrun
    %(prog)s train_net.py --num-gpus 8 --config-file cfg.yaml
    torchrun --nproc-per-node 8 -m d2amp_ext.cli run train_net.py --config-file cfg.yaml
  a module, as with python -m
    %(prog)s -m my_project.train --config-file cfg.yaml
"""


def add_arguments(parser):
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [-h] [--debug] [--trust] [-m] SCRIPT ..."
    parser.add_argument("--trust", action="store_true", help="allow config files and weights that can run code")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a folder with a __main__.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(args):
    """Runs the script to its end. Returns the exit status; a script that exits does so by SystemExit."""
    _check_module(args.script) if args.module else _check_script(args.script)

    from detectron2.utils import comm
    from detectron2.utils.logger import setup_logger

    from ..patches import current
    from ..patches.table import install, is_installed, uninstall

    setup_logger(distributed_rank=int(os.environ.get("RANK", comm.get_rank())), name="d2amp_ext")
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], is_installed()
    install(trust=args.trust)
    try:
        _run_as_main(args)
        if not current.touched:
            logging.getLogger("d2amp_ext").warning(
                f"{args.script} used no config, model or trainer of Detectron2: d2amp run changed nothing in it."
            )
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = before[:3]
        if not before[3]:
            uninstall()
    return 0


def _run_as_main(args):
    sys.argv[:] = [args.script, *args.args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = _first_of_path(args)
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except (UserError, FloatingPointError):
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        mistake = _mistake_of_a_child(error)
        if mistake is not None:
            raise mistake from error
        _print_as_python_does(error)
        raise SystemExit(1) from error


def _first_of_path(args):
    """What Python puts at the front of sys.path: the working directory for a module, the folder of a file."""
    if args.module:
        return [os.getcwd()]
    return [] if os.path.isdir(args.script) else [os.path.dirname(os.path.realpath(args.script))]  # runpy adds a folder


def _is_ours(error):
    """Whether an error is a missing package that `d2amp` itself needs, and not one of the script's."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("torch", "detectron2")


def _mistake_of_a_child(error):
    """The UserError that ended a process which the script's `launch` has started, or None. torch passes on its text."""
    found = re.findall(r"^(d2amp_ext\.[\w.]+): (.*(?:\n.+)*)", str(error), re.MULTILINE)
    if not found:
        return None
    name, message = found[-1]
    module, _, kind = name.rpartition(".")
    kind = getattr(sys.modules.get(module), kind, None)
    is_mistake = isinstance(kind, type) and issubclass(kind, UserError)
    return UserError(message.strip()) if is_mistake else None


def _print_as_python_does(error):
    """The traceback from the script on, without the frames that called it."""
    frames, here = error.__traceback__, {__file__, runpy.__file__}
    while frames.tb_next is not None and (
        frames.tb_frame.f_code.co_filename in here or "runpy" in frames.tb_frame.f_code.co_filename
    ):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _check_module(name):
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None and not Path(name.split(".")[0]).exists() and not Path(name.split(".")[0] + ".py").exists():
        raise UserError(f"There is no module {name!r}. Give the name as for python -m, or a file without -m.")


def _check_script(script):
    path = Path(script)
    if not path.exists():
        hint = " A module is run with -m." if re.fullmatch(r"[A-Za-z_][\w.]*", script) else ""
        raise UserError(f"The script {script} does not exist.{hint} Give the path of a Python file.")
    if path.is_dir():
        path = path / "__main__.py"
        if not path.exists():
            raise UserError(f"The folder {script} has no __main__.py. Give the path of a Python file.")
    imports = _imports(path)
    names = {name.split(".")[0] for name in imports}
    if names <= sys.stdlib_module_names | _WITHOUT_DETECTRON2:
        raise UserError(
            f"The script {script} imports no Detectron2, and neither does what it imports. d2amp run is for scripts "
            "that train with Detectron2; run this one with python."
        )


# Well-known packages that are not built on Detectron2.
_WITHOUT_DETECTRON2 = {"torch", "torchvision", "numpy", "scipy", "cv2", "PIL", "yaml", "tqdm", "matplotlib"}


def _imports(path, seen=None):
    """Names of all modules that a file imports, and those that the files beside it import."""
    seen = set() if seen is None else seen
    seen.add(path)
    names = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            return {"unknown"}  # a package: what it imports is not followed
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    for name in list(names):
        beside = [path.parent / (name.replace(".", "/") + ".py"), path.parent / name.replace(".", "/") / "__init__.py"]
        local = next((file for file in beside if file.is_file()), None)
        if local is not None:
            names.discard(name)
            names |= _imports(local, seen) if local not in seen else set()
    return names


def _parse(path):
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise UserError(f"{path} is not Python{where}: {error}. Give the path of a Python file.") from error
    except OSError as error:
        raise UserError(f"The script {path} cannot be read: {error}") from error
