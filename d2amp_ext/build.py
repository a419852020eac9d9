"""The parts of a run that Detectron2 makes inline: the inner trainer, schedules, and the model of several ranks."""

import logging

from detectron2.engine import SimpleTrainer
from detectron2.engine.defaults import create_ddp_model
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from fvcore.common.param_scheduler import ParamScheduler

from .errors import UserError
from .trainer import TRAINER_REGISTRY

logger = logging.getLogger(__name__)


def build_inner_trainer(cfg, policy, model, data_loader, optimizer, **stock):
    """The trainer that SOLVER.AMP.TRAINER names; Detectron2's own SimpleTrainer when AMP is off.

    Args:
        cfg (CfgNode): with the keys of `add_amp_config`.
        policy (PrecisionPolicy): of training, resolved.
        model (nn.Module): in DistributedDataParallel when there are several ranks.
        data_loader (iterable): of micro-batches.
        optimizer (torch.optim.Optimizer):
        **stock: arguments of Detectron2's AMPTrainer that count more than the cfg.

    Returns:
        SimpleTrainer

    Raises:
        UserError: for a name that is not registered.
    """
    if policy.precision == "off":
        return SimpleTrainer(model, data_loader, optimizer, **stock)
    name = cfg.SOLVER.AMP.TRAINER
    if name not in TRAINER_REGISTRY:
        known = ", ".join(key for key, _ in TRAINER_REGISTRY)
        raise UserError(f"SOLVER.AMP.TRAINER = {name!r} is not in TRAINER_REGISTRY. Registered: {known}.")
    trainer = TRAINER_REGISTRY.get(name)(
        model,
        data_loader,
        optimizer,
        policy=policy,
        accumulate_steps=cfg.SOLVER.ACCUMULATE_STEPS,
        **{
            "gather_metric_period": cfg.MONITOR.PERIOD or 20,
            "log_grad_scaler": cfg.SOLVER.AMP.LOG_GRAD_SCALER,
            **stock,
        },
    )
    batch = cfg.SOLVER.IMS_PER_BATCH
    logger.info(
        f"An update sees {batch * cfg.SOLVER.ACCUMULATE_STEPS} images: {cfg.SOLVER.ACCUMULATE_STEPS} "
        f"micro-batch(es) of {batch} over {comm.get_world_size()} rank(s)."
    )
    return trainer


def write_bundles(cfg, trainer, config, kind):
    """Makes a trainer write the steps that were not finite under OUTPUT_DIR, if it can.

    Args:
        cfg (CfgNode): with the keys of `add_amp_config`.
        trainer (SimpleTrainer):
        config (str): the config of the run as text.
        kind (str): "yaml" or "lazy".
    """
    if hasattr(trainer, "investigator"):
        trainer.investigator.write_bundles(cfg.OUTPUT_DIR, config, kind, cfg.SOLVER.AMP.BUNDLE_WEIGHTS)


def build_lr_multiplier(optimizer, scheduler, max_iter):
    """A torch scheduler of `max_iter` steps from one of fvcore's.

    Some of those, such as ConstantParamScheduler, have no value for the end itself, which Detectron2's hook asks for
    after the last update; they keep the one before it.

    Args:
        optimizer (torch.optim.Optimizer):
        scheduler (ParamScheduler): maps progress in [0, 1] to a factor of the learning rate.
        max_iter (int): updates.
    """
    try:
        scheduler(1.0)
    except RuntimeError:
        scheduler = _WithAnEnd(scheduler)
    return LRMultiplier(optimizer, scheduler, max_iter)


class _WithAnEnd(ParamScheduler):
    def __init__(self, scheduler):
        self._scheduler = scheduler

    def __call__(self, where):
        return self._scheduler(min(where, 1 - 1e-9))


def wrap_model(model, **ddp):
    """`model` in DistributedDataParallel when there are several ranks, on CPUs too, which Detectron2 leaves out.

    Args:
        model (nn.Module):
        **ddp: arguments of DistributedDataParallel, and Detectron2's `fp16_compression`.
    """
    if next(model.parameters()).device.type == "cpu":
        ddp["device_ids"] = None
    return create_ddp_model(model, **ddp)
