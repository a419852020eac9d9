"""`d2amp doctor`: what is installed, what the machine can do, and the command that mends what is wrong.

Needs the standard library alone.
"""

import argparse
import json
import sys

EXAMPLES = """
Every line has a verdict: ok; note, where something works but is slower or missing; bad, with the command that mends it.
torch, Detectron2 and the other packages are imported in processes of their own, so that a broken one is a line of the
answer. Nothing is changed.

examples:
  what is there, and what is wrong with it
    %(prog)s
  for a bug report, or for a program
    %(prog)s --json > doctor.json
  in a script: go on only where nothing is bad
    %(prog)s && d2amp train --config-file cfg.yaml

exit status: 0 nothing is bad; 3 something is; 2 a mistake in the arguments
"""


def add_arguments(parser):
    """The command line of `d2amp doctor`."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all facts, instead of the text")


def run(args):
    """Returns the exit status."""
    from ..doctor.lines import BAD, as_dict, describe, worst

    if not args.json:
        print("Looking at packages and devices; that takes some seconds ...", file=sys.stderr, flush=True)
    lines = examine()
    print(json.dumps(as_dict(lines), indent=2) if args.json else describe(lines))
    return 3 if worst(lines) == BAD else 0


def examine():
    """Looks at everything.

    Returns:
        list[doctor.lines.Line]:
    """
    from .. import __version__
    from ..doctor.devices import device_lines
    from ..doctor.lines import NOTE, OK, Line
    from ..doctor.machine import ask
    from ..doctor.packages import compiled_without_cuda, package_lines, see
    from ..doctor.storage import storage_lines

    seen = see()
    lines = [Line("d2amp-ext", OK, __version__, facts={"version": __version__}), *package_lines(seen)]
    if seen["torch"]["ok"]:
        facts = ask()
        lines += device_lines(facts)
        without_cuda = compiled_without_cuda(seen, facts)
        lines = [without_cuda if without_cuda and line.name == without_cuda.name else line for line in lines]
    else:
        lines.append(Line("devices", NOTE, "not looked at: that needs a torch that works"))
    return lines + storage_lines()
