"""`d2amp lazy` and tools/lazyconfig_train_net.py: train and evaluate a model from a LazyConfig."""

import logging
import weakref

from .flags import add_run_flags

EXAMPLES = """
examples:
  a config of Detectron2's zoo, in bf16
    %(prog)s --config-file COCO-Detection/retinanet_R_50_FPN_1x.py train.amp.enabled=True train.amp.precision=bf16
  one that checks in a few seconds that everything works
    %(prog)s --config-file quick/faster_rcnn_micro.py train.device=cpu
  eight GPUs; the same under torchrun
    %(prog)s --num-gpus 8 --config-file cfg.py
    torchrun --nproc-per-node 8 tools/lazyconfig_train_net.py --config-file cfg.py
  go on where a run stopped; evaluate only
    %(prog)s --resume --config-file cfg.py
    %(prog)s --eval-only --config-file cfg.py train.init_checkpoint=output/model_final.pth
"""


def add_arguments(parser):
    """Detectron2's flags, and ours."""
    configs = "a path, a config of this package, or a name in Detectron2's model zoo, that ends in .py"
    add_run_flags(parser, configs, "KEY=VALUE", "train.max_iter=1000 optimizer.lr=0.01")
    parser.epilog = EXAMPLES


def run(args):
    """Checks everything that can be checked without processes, then launches them. Returns the exit status."""
    from ..launch import launch

    launch(main, args, check=_load)
    return 0


def main(args):
    """One process of the run.

    Returns:
        dict or None: results of evaluation, on the main rank.
    """
    from detectron2.config import instantiate
    from detectron2.engine import default_setup

    from ..build import wrap_model
    from ..checkpoint import PrecisionCheckpointer

    config, cfg = _load(args)
    default_setup(config, args)
    if args.trust:
        logging.getLogger("d2amp_ext").warning("--trust: config files and weights may run code.")
    if not args.eval_only:
        return do_train(config, cfg, args)
    model = wrap_model(instantiate(config.model).to(cfg.MODEL.DEVICE))
    checkpointer = PrecisionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
    checkpointer.trust = args.trust
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
    return do_test(config, cfg, model)


def _make(config, name):
    """What a part of the config describes.

    Raises:
        UserError: when it is called with an argument that it does not take, or without one that it needs.
    """
    from detectron2.config import instantiate
    from omegaconf import OmegaConf

    from ..errors import UserError

    try:
        return instantiate(OmegaConf.select(config, name))
    except TypeError as error:
        raise UserError(f"`{name}` of the config cannot be made: {error}. Check the names of its arguments.") from error


def do_test(config, cfg, model):
    """Evaluates with the config's evaluator, if it has one, in the precision of `train.eval_amp`."""
    from detectron2.config import instantiate
    from detectron2.evaluation import inference_on_dataset, print_csv_format

    from ..evaluation import evaluating
    from ..policy import PrecisionPolicy

    if "evaluator" not in config.dataloader:
        return None
    with evaluating(model, PrecisionPolicy.for_evaluation(cfg)) as model:
        results = inference_on_dataset(
            model, instantiate(config.dataloader.test), instantiate(config.dataloader.evaluator)
        )
    print_csv_format(results)
    return results


def do_train(config, cfg, args):
    """Trains with the parts that the config describes, from the start or from the last checkpoint."""
    from detectron2.engine import default_writers
    from detectron2.engine import hooks as stock_hooks
    from detectron2.utils import comm
    from fvcore.common.param_scheduler import ParamScheduler

    from .. import hooks
    from ..build import build_inner_trainer, build_lr_multiplier, wrap_model, write_bundles
    from ..checkpoint import PrecisionCheckpointer
    from ..lazy import config_text, lazy_names
    from ..monitor import build_monitor_hooks, place, writers_of
    from ..policy import PrecisionPolicy
    from ..resume import ResumeState

    logger = logging.getLogger("d2amp_ext.lazy")
    train = config.train
    model = _make(config, "model").to(cfg.MODEL.DEVICE)
    logger.info(f"Model:\n{model}")
    text = config_text(config)  # before the model is in it
    config.optimizer.params.model = model
    optimizer = _make(config, "optimizer")
    loader = _make(config, "dataloader.train")
    model = wrap_model(model, **train.get("ddp", {}))
    policy = PrecisionPolicy.from_cfg(cfg).resolve(cfg.MODEL.DEVICE, "Precision of training")
    with lazy_names():
        trainer = build_inner_trainer(cfg, policy, model, loader, optimizer)
    write_bundles(cfg, trainer, text, "lazy")

    scheduler = _make(config, "lr_multiplier")
    if isinstance(scheduler, ParamScheduler):  # made now, so that a checkpoint can restore it
        scheduler = build_lr_multiplier(optimizer, scheduler, train.max_iter)
    resume_state = ResumeState(weakref.proxy(trainer), loader)
    checkpointer = PrecisionCheckpointer(model, train.output_dir, trainer=trainer, resume=resume_state)
    checkpointer.trust = args.trust
    is_main = comm.is_main_process()
    built = [
        stock_hooks.IterationTimer(),
        stock_hooks.LRScheduler(optimizer, scheduler),
        stock_hooks.PeriodicCheckpointer(checkpointer, **train.checkpointer) if is_main else None,
        stock_hooks.EvalHook(train.eval_period, lambda: do_test(config, cfg, model)),
        stock_hooks.PeriodicWriter(default_writers(train.output_dir, train.max_iter), period=train.log_period)
        if is_main
        else None,
        hooks.Resume(resume_state),
    ]
    others = None if is_main else (checkpointer, train.checkpointer.period)
    hold_lr_on_skip = cfg.SOLVER.AMP.HOLD_LR_ON_SKIP
    built = hooks.exchange(built, resume_state, hold_lr_on_skip, on_other_ranks=others)
    watching = build_monitor_hooks(cfg, policy, model, optimizer, writers=writers_of(built))
    trainer.register_hooks(place(watching, built))

    checkpointer.resume_or_load(train.init_checkpoint, resume=args.resume)
    start = trainer.iter + 1 if args.resume and checkpointer.has_checkpoint() else 0
    if start >= train.max_iter:
        logger.warning(
            f"Nothing to train: {start} updates are done and train.max_iter is {train.max_iter}. "
            "Set train.max_iter higher to go on."
        )
    trainer.train(start, train.max_iter)


def _load(args):
    from detectron2.utils import comm
    from detectron2.utils.logger import setup_logger

    from ..config_files import find_config
    from ..launch import choose_device, world_size
    from ..lazy import cfg_of, lazy_names, load_lazy, warn_of_unused
    from ..preflight import check_output, check_run

    if args.config_file:
        args.config_file = find_config(args.config_file)
    config = load_lazy(args.config_file, args.opts, trust=args.trust)
    cfg = cfg_of(config)
    with lazy_names():
        check_output(cfg.OUTPUT_DIR)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="d2amp_ext")
    warn_of_unused(cfg)
    choose_device(cfg)
    config.train.device = cfg.MODEL.DEVICE
    with lazy_names():
        check_run(cfg, train=not args.eval_only, resume=args.resume, world_size=world_size(args))
    return config, cfg
