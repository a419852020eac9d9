"""The flags that the training commands share: Detectron2's, and --trust."""

import argparse
import os


def add_run_flags(parser, configs, overrides, example):
    """Adds them, in the order in which --help shows them.

    Args:
        parser (ArgumentParser):
        configs (str): what --config-file may be.
        overrides (str): how an override is written, such as "KEY VALUE".
        example (str): of overrides.
    """
    port = 2**15 + 2**14 + hash(getattr(os, "getuid", int)()) % 2**14  # as in Detectron2
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config-file", default="", metavar="FILE", help=configs)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the weights (or, with --resume, the last "
                        "checkpoint) and do not train")  # fmt: skip
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N",
                        help="GPUs on this machine; without GPUs, processes on the CPU (default: 1)")  # fmt: skip
    parser.add_argument("--num-machines", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--machine-rank", type=int, default=0, metavar="N", help="number of this machine, from 0")
    parser.add_argument("--dist-url", default=f"tcp://127.0.0.1:{port}", metavar="URL",
                        help="where the processes meet; auto picks a free port (default: %(default)s)")  # fmt: skip
    parser.add_argument("--trust", action="store_true",
                        help="allow config files and weights that can run code")  # fmt: skip
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar=overrides,
                        help=f"config overrides, after all flags: {example}")  # fmt: skip
