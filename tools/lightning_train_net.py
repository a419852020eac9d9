#!/usr/bin/env python
"""Trains and evaluates a model from a YAML config with Lightning. The same as `d2amp lightning`; see --help."""

import sys
from pathlib import Path

try:
    from d2amp_ext.cli import run_command
except ModuleNotFoundError:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from d2amp_ext.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("lightning"))
