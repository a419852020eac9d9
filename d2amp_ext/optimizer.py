"""The optimizers that SOLVER.OPTIMIZER names."""

import torch
from detectron2.solver.build import get_default_optimizer_params, maybe_add_gradient_clipping

from .errors import UserError


def build_optimizer(cfg, model, stock):
    """An optimizer with Detectron2's per-parameter rules and gradient clipping.

    Args:
        cfg (CfgNode): SOLVER.OPTIMIZER is SGD or ADAMW.
        model (nn.Module):
        stock (callable): Detectron2's own `build_optimizer(cfg, model)`, which makes SGD.

    Returns:
        torch.optim.Optimizer
    """
    name = str(cfg.SOLVER.OPTIMIZER).upper()
    if name == "SGD":
        return stock(cfg, model)
    if name != "ADAMW":
        raise UserError(f"SOLVER.OPTIMIZER = {cfg.SOLVER.OPTIMIZER!r}: must be SGD or ADAMW.")
    parameters = get_default_optimizer_params(
        model,
        base_lr=cfg.SOLVER.BASE_LR,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM,
        bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS,
    )
    optimizer = torch.optim.AdamW(parameters, lr=cfg.SOLVER.BASE_LR, weight_decay=cfg.SOLVER.WEIGHT_DECAY)
    return maybe_add_gradient_clipping(cfg, optimizer)
