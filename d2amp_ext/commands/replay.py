"""`d2amp replay`: make a step that was not finite again, from the bundle that the run wrote."""

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile

from ..errors import UserError

EXAMPLES = """
A run writes a bundle into nonfinite/ of its output folder when a step is not finite: the batch, the random state, the
config, and with SOLVER.AMP.BUNDLE_WEIGHTS True the weights. This command builds the model from it, replays the step and
says which module was the first that was not finite.

examples:
  as it was, with the weights in the bundle or the last checkpoint of the run beside it
    %(prog)s output/nonfinite/iteration_0000123_rank0.pth
  in another precision; with a module in fp32
    %(prog)s BUNDLE --precision fp32
    %(prog)s BUNDLE SOLVER.AMP.FP32_MODULES "('roi_heads.*',)"
  on another machine, from a run with a LazyConfig
    %(prog)s BUNDLE --weights model_0005000.pth --config-file cfg.py

exit status: 0 everything was finite; 3 something was not; 2 a mistake in the arguments, the bundle or the weights; 1 the
replay itself failed
"""

logger = logging.getLogger(__name__)


def add_arguments(parser):
    """The command line of `d2amp replay`."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("bundle", metavar="BUNDLE", help="a file of the folder nonfinite/ in the output of a run")
    parser.add_argument("--weights", metavar="FILE", help="the model's weights, a path or URL; default: those in the "
                        "bundle, else the last checkpoint of the run whose folder the bundle is in")  # fmt: skip
    parser.add_argument("--precision", metavar="P", help="auto, fp32, tf32, fp16 or bf16; default: as recorded")
    parser.add_argument("--config-file", default="", metavar="FILE", help="a YAML or LazyConfig in place of the one in "
                        "the bundle")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result for programs, as JSON, on stdout")
    parser.add_argument("--trust", action="store_true",
                        help="allow a LazyConfig in the bundle, and weights, that can run code")  # fmt: skip
    parser.add_argument("opts", nargs="*", metavar="OVERRIDE",
                        help="config overrides: KEY VALUE, or KEY=VALUE for a LazyConfig")  # fmt: skip
    parser.parse_args = parser.parse_intermixed_args  # flags may stand on either side of BUNDLE


def run(args):
    """Returns the exit status."""
    from detectron2.utils.logger import setup_logger

    from ..numerics.bundle import BundleError, read_bundle
    from ..numerics.locate import locate
    from ..numerics.protect import protect
    from ..random_state import restore

    for name in ("d2amp_ext", "fvcore"):
        for handler in setup_logger(name=name).handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # stdout is for the result
    bundle = read_bundle(args.bundle)
    if bundle["random"] is not None:
        try:
            restore(bundle["random"])
        except Exception as error:  # whatever another generator than the saved one may hold
            raise BundleError(f"The bundle {args.bundle} is damaged: its random state is none ({error}).") from error
    cfg, model = _build(args, bundle)
    policy = _policy(args, cfg, bundle)
    weights = _load_weights(args, bundle, model)
    protect(model, policy)
    model.train()
    scale = _scale(bundle, policy)
    finding = locate(
        model, bundle["batches"], policy, scale=scale, random=bundle["random"], iteration=bundle["iteration"]
    )
    result = {
        "bundle": args.bundle,
        "iteration": bundle["iteration"],
        "rank": bundle["rank"],
        "weights": weights,
        "device": cfg.MODEL.DEVICE,
        "recorded": {"precision": bundle["precision"], "device": str(bundle.get("device", "")), "scale": bundle["scale"],
                     "losses": _numbers(bundle["losses"]), "finding": str(bundle["finding"].get("description", "")),
                     "versions": bundle["versions"]},
        "replayed": {"precision": policy.precision, "scale": scale, "losses": _numbers(finding.losses),
                     "finding": finding.as_dict(), "advice": finding.advice},
    }  # fmt: skip
    print(json.dumps(result, indent=2, default=str) if args.json else _for_people(result))
    return 3 if finding.found else 0


def _build(args, bundle):
    """The cfg of the run and its model, on a device that is there."""
    from detectron2.modeling import build_model

    from ..config import load_cfg

    config_file, kind = args.config_file, bundle["config_kind"]
    if config_file:
        kind = "lazy" if config_file.endswith(".py") else "yaml"
    elif not bundle["config"]:
        raise UserError(f"The bundle {args.bundle} holds no config: name that of the run with --config-file.")
    if kind == "lazy":
        return _build_lazy(args, bundle)
    cfg = load_cfg(config_file, args.opts, trust=args.trust) if config_file else _cfg_of(bundle, args)
    _choose(cfg)
    try:
        return cfg, build_model(cfg)
    except KeyError as error:
        raise UserError(
            f"The model of {config_file or args.bundle} cannot be built here: {error}. What a project registers is known "
            "only where its code is imported; in such code use d2amp_ext.numerics: read_bundle and locate."
        ) from error


def _cfg_of(bundle, args):
    """The config in the bundle, from here or another version: keys that are unknown here are kept. Runs no code."""
    from detectron2.config import CfgNode, get_cfg

    from ..config import add_amp_config, check_cfg
    from ..config_files import parse_yaml

    cfg = get_cfg()
    add_amp_config(cfg)
    cfg.set_new_allowed(True)
    try:
        cfg.merge_from_other_cfg(CfgNode(parse_yaml(bundle["config"], f"in {args.bundle}")))
    except (AssertionError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"The config in {args.bundle} cannot be used: {error}") from error
    cfg.set_new_allowed(False)
    cfg.merge_from_list(args.opts)
    check_cfg(cfg)
    return cfg


def _build_lazy(args, bundle):
    from detectron2.config import instantiate

    from ..lazy import cfg_of, load_lazy

    if args.config_file:
        config = load_lazy(args.config_file, args.opts, trust=args.trust)
    elif not args.trust:
        raise UserError(
            f"The bundle {args.bundle} comes from a run with a LazyConfig, which can run code when it is used. Name the "
            "config with --config-file CFG.py, or pass --trust when you know where the bundle comes from."
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "config.yaml")
            with open(path, "w", encoding="utf-8") as file:
                file.write(bundle["config"])
            config = load_lazy(path, args.opts, trust=True)
    cfg = cfg_of(config)
    _choose(cfg)
    return cfg, instantiate(config.model).to(cfg.MODEL.DEVICE)


def _choose(cfg):
    from ..launch import choose_device

    choose_device(cfg)


def _policy(args, cfg, bundle):
    """What the config says of the model, in the precision asked for or recorded."""
    from ..policy import PrecisionPolicy
    from ..precisions import parse_precision

    precision = parse_precision(args.precision or bundle["precision"], "--precision")
    policy = dataclasses.replace(PrecisionPolicy.from_amp_node(cfg.SOLVER.AMP), precision=precision)
    return policy.resolve(cfg.MODEL.DEVICE, "Precision of the replay")


def _scale(bundle, policy):
    if not policy.uses_scaler:
        return 1.0
    return bundle["scale"] if bundle["precision"] == "fp16" else policy.scaler.static or policy.scaler.init_scale


def _load_weights(args, bundle, model):
    """Loads weights and returns where they come from."""
    from ..checkpoint import PrecisionCheckpointer

    checkpointer = PrecisionCheckpointer(model)
    checkpointer.trust = args.trust
    if args.weights:
        checkpointer.load(args.weights)
        return args.weights
    if bundle["weights"]:
        try:
            model.load_state_dict(bundle["weights"])
        except (RuntimeError, TypeError) as error:
            raise UserError(f"The weights in {args.bundle} do not fit the model: {_first_lines(error)}") from error
        return "the bundle"
    folder = os.path.dirname(os.path.dirname(os.path.abspath(args.bundle)))
    candidates = PrecisionCheckpointer(model, folder).resume_candidates()
    path = next(filter(os.path.isfile, candidates), None)
    if path is None:
        raise UserError(
            f"The bundle {args.bundle} holds no weights, and there is no checkpoint in {folder}. Name a file with --weights. "
            "Runs with SOLVER.AMP.BUNDLE_WEIGHTS True write the weights into their bundles."
        )
    logger.warning(f"The weights are those of {path}, not those of the step itself, which may differ.")
    checkpointer.load(path)
    return path


def _first_lines(error):
    return " ".join(line.strip() for line in str(error).splitlines()[:3])[:400]


def _numbers(losses):
    from ..numerics.finding import jsonable

    return {str(name): jsonable(float(value)) for name, value in losses.items()}


def _for_people(result):
    recorded, replayed = result["recorded"], result["replayed"]
    lines = [
        f"Iteration {result['iteration']}, rank {result['rank']}, with the weights of {result['weights']}.",
        "",
        f"  {'':24s} {'recorded':>14s} {'replayed':>14s}",
        f"  {'precision':24s} {recorded['precision']:>14s} {replayed['precision']:>14s}",
        f"  {'gradient scale':24s} {recorded['scale']:>14g} {replayed['scale']:>14g}",
        f"  {'device':24s} {recorded['device']:>14s} {result['device']:>14s}",
    ]
    for name in dict.fromkeys([*recorded["losses"], *replayed["losses"]]):
        values = (_figure(side["losses"].get(name)) for side in (recorded, replayed))
        lines.append(f"  {name:24s} " + " ".join(f"{value:>14s}" for value in values))
    lines += ["", f"Recorded: {recorded['finding'] or 'nothing.'}", f"Replayed: {replayed['finding']['description']}"]
    if replayed["advice"]:
        lines.append(f"To try:   {replayed['advice']}")
    return "\n".join(lines)


def _figure(value):
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"
