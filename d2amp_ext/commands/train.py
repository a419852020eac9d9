"""`d2amp train` and tools/train_net.py: train and evaluate a model from a YAML config."""

import logging
import os

from .flags import add_run_flags

EXAMPLES = """
examples:
  on this machine's GPU, or on its CPU where there is none
    %(prog)s --config-file COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml SOLVER.AMP.ENABLED True
  choose the precision: auto, bf16, fp16, tf32, fp32
    %(prog)s --config-file cfg.yaml SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION bf16
  eight GPUs; the same under torchrun
    %(prog)s --num-gpus 8 --config-file cfg.yaml
    torchrun --nproc-per-node 8 tools/train_net.py --config-file cfg.yaml
  go on where a run stopped; evaluate only
    %(prog)s --resume --config-file cfg.yaml
    %(prog)s --eval-only --config-file cfg.yaml MODEL.WEIGHTS output/model_final.pth
"""


def add_arguments(parser):
    """Detectron2's flags, and ours."""
    configs = "a path, a config of this package, or a name in Detectron2's model zoo"
    add_run_flags(parser, configs, "KEY VALUE", "SOLVER.BASE_LR 0.01 DATASETS.TEST \"('mine',)\"")
    parser.epilog = EXAMPLES


def run(args):
    """Checks everything that can be checked without processes, then launches them. Returns the exit status."""
    from ..launch import launch

    launch(main, args, check=_load)
    return 0


def main(args):
    """One process of the run.

    Returns:
        OrderedDict: results of evaluation, on the main rank.
    """
    from detectron2.engine import default_setup, hooks
    from detectron2.evaluation import verify_results
    from detectron2.utils import comm

    from ..checkpoint import PrecisionCheckpointer
    from ..config import write_stock_config
    from ..default_trainer import PrecisionTrainer

    cfg = _load(args)
    cfg.freeze()
    default_setup(cfg, args)
    if args.trust:
        logging.getLogger("d2amp_ext").warning("--trust: config files and weights may run code.")
    if comm.is_main_process():
        write_stock_config(cfg, os.path.join(cfg.OUTPUT_DIR, "config_stock.yaml"))

    if args.eval_only:
        model = PrecisionTrainer.build_model(cfg)
        checkpointer = PrecisionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
        checkpointer.trust = args.trust
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        results = PrecisionTrainer.test(cfg, model)
        if cfg.TEST.AUG.ENABLED:
            results.update(PrecisionTrainer.test_with_tta(cfg, model))
        if comm.is_main_process():
            verify_results(cfg, results)
        return results

    trainer = PrecisionTrainer(cfg)
    trainer.checkpointer.trust = args.trust
    trainer.resume_or_load(resume=args.resume)
    if cfg.TEST.AUG.ENABLED:
        trainer.register_hooks([hooks.EvalHook(0, lambda: trainer.test_with_tta(cfg, trainer.model))])
    return trainer.train()


def _load(args):
    from detectron2.utils import comm
    from detectron2.utils.logger import setup_logger

    from ..config import load_cfg
    from ..config_files import find_config
    from ..launch import choose_device, world_size
    from ..preflight import check_output, check_run

    if args.config_file:
        args.config_file = find_config(args.config_file)
    cfg = load_cfg(args.config_file, args.opts, trust=args.trust)
    check_output(cfg.OUTPUT_DIR)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="d2amp_ext")
    choose_device(cfg)
    check_run(cfg, train=not args.eval_only, resume=args.resume, world_size=world_size(args))
    return cfg
