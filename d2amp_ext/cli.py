"""The command `d2amp`."""

import argparse
import importlib
import logging
import os
import signal
import sys
import traceback
import warnings

from . import __version__, _compat
from .errors import UserError

# Name -> (module with add_arguments and run, one line of help).
COMMANDS = {
    "train": ("commands.train", "train and evaluate a model from a YAML config"),
    "lazy": ("commands.lazy", "train and evaluate a model from a LazyConfig"),
    "run": ("commands.run", "run somebody's own training script, unedited, with this package"),
    "lightning": ("commands.lightning", "train and evaluate a model from a YAML config with Lightning"),
    "predict": ("commands.predict", "draw a model's predictions on images"),
    "replay": ("commands.replay", "make a step that was not finite again, and find the module where it began"),
    "audit": ("commands.audit", "measure what a precision changes on a model and its data, and which modules are to blame"),
    "demo": ("commands.demo", "train a detector on real microscopy images in a few minutes"),
    "setup": ("setup_detectron2", "install torch and Detectron2 where they are missing"),
    "doctor": ("commands.doctor", "say what is installed, what this machine can do, and how to mend what is wrong"),
}

DESCRIPTION = """
Mixed-precision training and evaluation for Detectron2.

first steps:
  d2amp setup     install torch and Detectron2 where they are missing
  d2amp doctor    say what is there, and how to mend what is wrong
  d2amp demo      train a detector on real images and see it work
  d2amp train --config-file COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml SOLVER.AMP.ENABLED True
"""


def main(argv=None):
    """Runs a command.

    Args:
        argv (list[str] or None): None means sys.argv[1:].

    Returns:
        int: 0 done; 1 the run failed or gave up; 2 a user's mistake; 3 `replay`, `audit` or `doctor` found
            something; 128+N ended by signal N.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("d2amp", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"d2amp-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_known_args(argv[:1])[0].command
    return run_command(command, argv[1:], prog=f"d2amp {command}")


def run_command(name, argv=None, prog=None):
    """Runs one command with its own arguments; what tools/*.py call. Returns the exit status."""
    module_name, text = COMMANDS[name]
    _hush_torch()
    try:
        module = importlib.import_module(f".{module_name}", __package__)
        parser = argparse.ArgumentParser(prog=prog, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")
        module.add_arguments(parser)
        args = parser.parse_args(argv)
    except SystemExit as error:  # argparse: 0 after --help, 2 after a usage error
        return error.code
    try:
        return module.run(args)
    except UserError as error:
        return _mistake(error, args.debug)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__package__):
            raise
        return _mistake(_compat.missing_package_error(f"d2amp {name}", error), args.debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except FloatingPointError as error:
        _mistake(error, args.debug)
        return 1
    except Exception:
        logging.getLogger(__package__).exception("The run failed:")
        return 1


def _mistake(error, debug):
    """Prints an error as one line, with `debug` below its traceback. Returns the exit status of a mistake."""
    if debug:
        traceback.print_exc()
    print(f"error: {error}", file=sys.stderr)
    return 2


# What torch says about Detectron2's own code, which a user cannot act on.
_ABOUT_DETECTRON2 = {
    "`torch.jit.script` is deprecated": "FutureWarning",
    "`broadcast_buffers` is deprecated": "FutureWarning",
    "torch.meshgrid": "UserWarning",
}


def _hush_torch():
    """Leaves those out, here and in processes that are started from here."""
    for message, category in _ABOUT_DETECTRON2.items():
        warnings.filterwarnings("ignore", message=message)
        entries = [os.environ.get("PYTHONWARNINGS", ""), f"ignore:{message}:{category}"]
        if entries[1] not in entries[0]:
            os.environ["PYTHONWARNINGS"] = ",".join(filter(None, entries))


if __name__ == "__main__":
    sys.exit(main())
