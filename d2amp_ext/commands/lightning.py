"""`d2amp lightning` and tools/lightning_train_net.py: train and evaluate a model from a YAML config with Lightning."""

import logging
import os
import signal

from .flags import add_run_flags

EXAMPLES = """
examples:
  needs Lightning
    pip install "d2amp-ext[lightning]"
  as d2amp train, and the same losses
    %(prog)s --config-file cfg.yaml SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION bf16
  the precision in Lightning's words
    %(prog)s --config-file cfg.yaml --precision bf16-mixed
  eight GPUs; the same under torchrun
    %(prog)s --devices 8 --strategy ddp --config-file cfg.yaml
    torchrun --nproc-per-node 8 tools/lightning_train_net.py --config-file cfg.yaml
  go on from output/last.ckpt; evaluate only
    %(prog)s --resume --config-file cfg.yaml
    %(prog)s --eval-only --config-file cfg.yaml MODEL.WEIGHTS output/model_final.pth
"""


def add_arguments(parser):
    """Detectron2's flags, ours, and Lightning's."""
    configs = "a path, a config of this package, or a name in Detectron2's model zoo"
    lightnings = parser.add_argument_group("Lightning")
    lightnings.add_argument("--accelerator", default="auto", metavar="NAME",
                            help="auto (as MODEL.DEVICE says), cpu, gpu, ... (default: auto)")  # fmt: skip
    lightnings.add_argument("--devices", type=int, metavar="N", help="the same as --num-gpus")
    lightnings.add_argument("--num-nodes", type=int, metavar="N", help="the same as --num-machines")
    lightnings.add_argument("--strategy", default="auto", metavar="NAME",
                            help="how processes work together: auto, ddp, ... (default: auto)")  # fmt: skip
    lightnings.add_argument("--precision", metavar="NAME",
                            help="sets SOLVER.AMP: auto, fp32, tf32, fp16, bf16, or a name of Lightning's such as 16-mixed. 64, "
                            "16-true, bf16-true and transformer-engine go past our policy")  # fmt: skip
    add_run_flags(parser, configs, "KEY VALUE", "SOLVER.BASE_LR 0.01 DATASETS.TEST \"('mine',)\"")
    parser.epilog = EXAMPLES


def run(args):
    """Checks everything that can be checked without processes, then launches them. Returns the exit status."""
    from .. import _compat
    from ..errors import UserError
    from ..launch import launch

    try:
        _compat.check_lightning()
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise UserError(str(error)) from error
    _merge_counts(args)
    return launch(main, args, check=_load) or 0


def main(args):
    """One process of the run. Returns the exit status."""
    from detectron2.engine import default_setup, hooks
    from detectron2.evaluation import verify_results
    from detectron2.utils import comm

    from ..config import write_stock_config
    from ..lightning import DataModule, TrainingModule
    from ..lightning.options import build_trainer

    cfg, precision = _load(args)
    cfg.freeze()
    trainer = build_trainer(cfg, args.accelerator, args.strategy, precision, args.trust)
    default_setup(cfg, args)
    logger = logging.getLogger("d2amp_ext")
    if args.trust:
        logger.warning("--trust: config files and weights may run code.")
    if comm.is_main_process():
        write_stock_config(cfg, os.path.join(cfg.OUTPUT_DIR, "config_stock.yaml"))
    module, data = TrainingModule(cfg, trust=args.trust), DataModule(cfg)
    path = _checkpoint(cfg, args)
    if not args.eval_only:
        if cfg.TEST.AUG.ENABLED:
            module.register_hooks([hooks.EvalHook(0, lambda: module.parts.test_with_tta(cfg, module.model))])
        status = _fit(trainer, module, data, path)
        if status:
            return status
        if module.loop is None:
            logger.warning(f"Nothing to train: {path} has the {cfg.SOLVER.MAX_ITER} updates of SOLVER.MAX_ITER. Set that "
                           "higher to go on.")  # fmt: skip
    if module.loop is None:
        trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
        if cfg.TEST.AUG.ENABLED:
            module.last_results.update(module.parts.test_with_tta(cfg, module.model))
    if cfg.TEST.EXPECTED_RESULTS and comm.is_main_process():
        verify_results(cfg, module.last_results)
    return 0


def _fit(trainer, module, data, path):
    """Trains. Returns the exit status: Lightning turns signals into exits with statuses of its own."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    try:
        trainer.fit(module, datamodule=data, ckpt_path=path)
    except SIGTERMException:
        return 128 + signal.SIGTERM
    except SystemExit:
        if trainer.interrupted:
            raise KeyboardInterrupt from None
        raise
    return 0


def _checkpoint(cfg, args):
    """The last.ckpt to go on from, or None.

    Raises:
        UserError: when the newest checkpoint is one of d2amp train.
    """
    import torch

    from ..checkpoint import PrecisionCheckpointer
    from ..lightning_files import LAST, check_tool

    if not args.resume:
        return None
    candidates = PrecisionCheckpointer(torch.nn.Module(), cfg.OUTPUT_DIR).resume_candidates()
    check_tool(cfg.OUTPUT_DIR, candidates, lightning=True)
    path = os.path.join(cfg.OUTPUT_DIR, LAST)
    if os.path.isfile(path):
        return path
    weights = cfg.MODEL.WEIGHTS or "random weights"
    logging.getLogger("d2amp_ext").warning(f"--resume: there is no {path} to go on from. Starting from {weights}.")
    return None


def _merge_counts(args):
    """--devices and --num-nodes are other names of Detectron2's flags."""
    from ..errors import UserError

    for ours, theirs, default in (("num_gpus", "devices", 1), ("num_machines", "num_nodes", 1)):
        count = getattr(args, theirs)
        if count is None:
            continue
        if getattr(args, ours) not in (default, count):
            flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in (theirs, ours)]
            raise UserError(f"{' and '.join(flags)} mean the same and differ. Leave one out.")
        setattr(args, ours, count)


def _load(args):
    """The cfg, and Lightning's name of a precision that goes past the policy."""
    from detectron2.utils import comm
    from detectron2.utils.logger import setup_logger

    from ..config import check_cfg, read_cfg
    from ..config_files import find_config
    from ..launch import choose_device, world_size
    from ..lightning.names import apply_precision, leave_to_strategy
    from ..policy import PrecisionPolicy
    from ..preflight import check_output, check_run

    if args.config_file:
        args.config_file = find_config(args.config_file)
    cfg = read_cfg(args.config_file, args.opts, trust=args.trust)
    check_output(cfg.OUTPUT_DIR)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="d2amp_ext")
    precision = apply_precision(cfg, args.precision)
    if args.accelerator == "cpu" or args.num_gpus == 0:
        cfg.MODEL.DEVICE = "cpu"
    choose_device(cfg)
    check_cfg(cfg)
    precision = precision or leave_to_strategy(cfg, args.strategy, PrecisionPolicy.from_cfg(cfg))
    check_run(cfg, train=not args.eval_only, resume=args.resume, world_size=world_size(args))
    return cfg, precision
