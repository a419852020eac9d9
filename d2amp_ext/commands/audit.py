"""`d2amp audit`: what a precision changes on a model and its data, which modules are to blame, and what mends it."""

import argparse
import dataclasses
import json
import logging
import os
import sys

from ..errors import UserError

EXAMPLES = """
The same batches, images, weights and random state go through fp32 and through the chosen precision. The tables say how
far losses, gradients, predictions and AP are apart, and which modules add the error. Where something is above its limit,
the shortest list of modules to keep in fp32 is looked for by trying, and printed as lines of config. docs/audit.md says how
to read the tables. Nothing is trained.

examples:
  a finished run, in the precision of its config
    %(prog)s --config-file output/config.yaml --weights output/model_final.pth
  bf16, without the evaluation of the whole test set
    %(prog)s --config-file cfg.yaml --weights model.pth --precision bf16 --no-ap
  a LazyConfig
    %(prog)s --config-file cfg.py --weights model.pth --precision fp16 train.amp.shield=False
  in a script: fail when an error is above its limit
    %(prog)s --config-file cfg.yaml --weights model.pth --json audit.json --tolerance 0.01 || exit 1

exit status: 0 everything is within its limit; 3 something is not; 2 a mistake in the arguments, the config or the weights;
1 the audit itself failed
"""

FOLDER = "audit"
logger = logging.getLogger(__name__)


def add_arguments(parser):
    """The command line of `d2amp audit`."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config-file", default="", metavar="FILE", help="a YAML config or a LazyConfig (.py)")
    parser.add_argument("--weights", metavar="FILE", help="the model's weights, a path or URL; default: MODEL.WEIGHTS or "
                        "train.init_checkpoint of the config")  # fmt: skip
    parser.add_argument("--precision", metavar="P", help="auto, bf16, fp16 or tf32; default: SOLVER.AMP.PRECISION, whether "
                        "AMP is enabled or not")  # fmt: skip
    parser.add_argument("--images", type=int, default=32, metavar="N", help="images of the test set whose predictions are "
                        "compared; 0 leaves out evaluation altogether (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batches", type=int, default=2, metavar="N",
                        help="training batches (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="X", help="the largest relative error of a loss; "
                        "all other limits follow from it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--no-ap", action="store_true", help="leave out the evaluation of the whole test set, once in fp32 "
                        "and once in the precision")  # fmt: skip
    parser.add_argument("--no-proposal", action="store_true", help="do not look for modules to keep in fp32")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found as JSON, too")
    parser.add_argument("--trust", action="store_true",
                        help="allow config files and weights that can run code")  # fmt: skip
    parser.add_argument("opts", nargs="*", metavar="OVERRIDE",
                        help="config overrides: KEY VALUE, or KEY=VALUE for a LazyConfig")  # fmt: skip
    parser.parse_args = parser.parse_intermixed_args


def run(args):
    """Returns the exit status."""
    from detectron2.utils.env import seed_all_rng
    from detectron2.utils.logger import setup_logger

    from ..audit.limits import ap_figures
    from ..audit.measure import Auditor
    from ..audit.plot import plot
    from ..audit.propose import propose
    from ..audit.report import Report
    from ..audit.subject import load, results_of

    _check(args)
    for name in ("d2amp_ext", "fvcore"):
        for handler in setup_logger(name=name).handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # stdout is for the result
    subject = load(args.config_file, args.opts, args.weights, evaluate=args.images > 0, trust=args.trust)
    policy = _policy(args, subject.cfg)
    folder = os.path.join(subject.cfg.OUTPUT_DIR, FOLDER)
    os.makedirs(folder, exist_ok=True)
    seed = max(subject.cfg.SEED, 0)
    model = subject.build_model()
    seed_all_rng(seed)  # whatever a model draws for weights that it does not keep
    batches, images = subject.batches(args.batches), subject.images(args.images)
    seed_all_rng(seed)
    auditor = Auditor(model, policy, batches, images, tolerance=args.tolerance)
    measured = auditor.measure()
    report = Report(
        {"config": args.config_file, "weights": subject.weights, "device": policy.device, "tolerance": args.tolerance,
         "batches": len(batches), "images": len(images)},
        subject.lazy,
        measured,
        auditor.ranking(policy, True),
        auditor.ranking(policy, False),
    )  # fmt: skip
    if images and not args.no_ap:
        found = [results_of(subject, model_of, each, os.path.join(folder, each.precision))
                 for model_of, each in ((auditor.reference, auditor.fp32), (auditor.protected(policy), policy))]  # fmt: skip
        report.results = {name: (value, found[1][name]) for name, value in found[0].items() if name in found[1]}
        report.result_figures = ap_figures(found[1], found[0], args.tolerance)
    if measured.excess > 1 and policy.precision in ("fp16", "bf16") and not args.no_proposal:
        report.proposal = propose(auditor, measured)
    _write(report, folder, args.json, plot)
    print(report.describe())
    return 3 if report.exceeding else 0


def _check(args):
    if not args.config_file:
        raise UserError("--config-file is missing. Name the YAML config or the LazyConfig of the model to audit.")
    if args.images < 0 or args.batches < 1:
        raise UserError(
            f"--images {args.images} --batches {args.batches}: images must be 0 or more, and batches 1 or more."
        )
    if not 0 < args.tolerance < 1:
        raise UserError(f"--tolerance {args.tolerance:g}: must lie between 0 and 1; 0.02 allows 2 % in a loss.")
    if args.json and not os.path.isdir(os.path.dirname(os.path.abspath(args.json))):
        raise UserError(f"--json {args.json}: the folder of this file does not exist.")


def _policy(args, cfg):
    """What the config says, in the precision asked for, on the device."""
    import torch

    from .. import _compat
    from ..policy import PrecisionPolicy
    from ..precisions import parse_precision

    asked = "--precision" if args.precision else "SOLVER.AMP.PRECISION (train.amp.precision)"
    precision = parse_precision(args.precision or cfg.SOLVER.AMP.PRECISION, asked)
    policy = dataclasses.replace(PrecisionPolicy.from_amp_node(cfg.SOLVER.AMP), precision=precision)
    policy = policy.resolve(cfg.MODEL.DEVICE, "Precision that is audited")
    device = torch.device(policy.device)
    has_tf32 = "tf32" in _compat.native_precisions(device.type, device.index)[0]
    if policy.precision == "fp32" or policy.precision == "tf32" and not has_tf32:
        raise UserError(
            f"{asked} = {precision!r} is fp32 on {cfg.MODEL.DEVICE}, and an audit compares with fp32: there is nothing to "
            "find. Choose bf16 or fp16, such as --precision bf16."
        )
    return policy


def _write(report, folder, json_file, plot):
    from ..files import write_whole

    text = json.dumps(report.as_dict(), indent=2)
    for path in filter(None, [os.path.join(folder, "audit.json"), json_file]):
        write_whole(path, lambda file: file.write(text.encode()))
    picture = os.path.join(folder, "audit.png")
    try:
        plot(report, picture)
    except Exception as error:  # a picture is not worth the audit
        logger.warning(f"The picture {picture} was not drawn: {type(error).__name__}: {error}")
    else:
        logger.info(f"Wrote {picture} and {os.path.join(folder, 'audit.json')}.")
