"""Finds or installs torch, torchvision and Detectron2: `d2amp setup`, or `python -m d2amp_ext.setup_detectron2`.

Needs only the standard library, so that it runs before any of them is there. What this Python imports is kept.
"""

import argparse
import sys
from pathlib import Path

from .errors import UserError
from .installer.environment import CommandFailed, Environment
from .installer.steps import AGAIN, PIP, Setup, SetupError, first_line
from .installer.venv import make_venv
from .installer.wheel import NOTE_NAME


def add_arguments(parser):
    """Adds the options of the set-up to a parser."""
    parser.add_argument(
        "--source",
        choices=("auto", "official", "index"),
        default="auto",
        help="where Detectron2 comes from if there is none: official is its repository, built here with git and a C++ "
        "compiler; index is sal-detectron2 from the package index, as pure Python; auto is the first of these that can "
        "be had (default)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, install nothing")
    parser.add_argument("-q", "--quiet", action="store_true", help="show what pip says only when it fails")
    parser.add_argument(
        "--make-venv",
        metavar="DIR",
        help="only make a virtual environment in DIR, one that keeps the torch and torchvision of this Python",
    )


def run(args):
    """Does what the arguments say.

    Args:
        args: as parsed by a parser that `add_arguments` has seen.

    Returns:
        int: 0 done, 1 failed, 2 a mistake in the arguments, 130 interrupted.
    """
    try:
        if args.make_venv:
            make_venv(args.make_venv)
        else:
            seen = Setup(Environment(quiet=args.quiet), source=args.source, dry_run=args.dry_run).run()
            if seen:
                print_summary(seen)
    except UserError as error:
        print(f"d2amp setup: {error}", file=sys.stderr)
        return 2
    except CommandFailed as error:
        print(f"{error.output}\nd2amp setup: {error}. When that is mended, type:\n    {AGAIN}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"\nd2amp setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nd2amp setup: stopped. To go on, type:\n    {AGAIN}", file=sys.stderr)
        return 130
    return 0


def print_summary(seen):
    """Prints which torch and Detectron2 are there, and what that one cannot do."""
    torch, found = seen["torch"], seen["detectron2"]
    where = Path(found["file"]).parent
    ours = any(where.parent.glob(f"*detectron2*.dist-info/{NOTE_NAME}"))
    origin = " ".join(f"{name} {version}" for name, version in found["owners"].items()) or "not installed by pip"
    print()
    print(f"torch       {torch['version']} ({torch['build']}) with torchvision {seen['torchvision']['version']}")
    print(f"Detectron2  {found['version']} ({origin}{', as pure Python' if ours else ''}) in {where}")
    if found["compiled_error"] is None:
        print("            with its compiled module: nothing is missing")
        return
    print("            without its compiled module: no rotated boxes, no deformable convolution, and COCO evaluation")
    print("            without its fast version; everything else trains and evaluates")
    if not ours:
        print(f"            why: {first_line(found['compiled_error'])}")
    print("For the official one (git, a C++ compiler and access to its repository are needed) type:")
    print(f"    {PIP} uninstall -y {' '.join(found['owners'])}" if found["owners"] else f"    remove {where}")
    print(f"    {AGAIN} --source official", flush=True)


def main(argv=None):
    """The command line; `argv` is `sys.argv[1:]` by default."""
    parser = argparse.ArgumentParser(
        prog="d2amp setup",
        description="Find or install torch, torchvision and Detectron2. What this Python imports already is kept, and "
        "a Detectron2 that is there is never replaced. A call that was stopped half-way is finished by the next one.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
