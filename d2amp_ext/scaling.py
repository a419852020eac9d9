"""SOLVER.REFERENCE_WORLD_SIZE with gradient accumulation."""

import logging

from .errors import UserError

logger = logging.getLogger(__name__)


def scale_to_world(cfg, world_size):
    """The cfg for `world_size` ranks and SOLVER.ACCUMULATE_STEPS, from one made for SOLVER.REFERENCE_WORLD_SIZE.

    The images per rank and micro-batch stay. The LR grows with the images per update, ranks times micro-batches; the
    numbers of iterations shrink by the same factor. Without accumulation Detectron2 does this itself, and the cfg is
    returned as it is.

    Args:
        cfg (CfgNode): not changed.
        world_size (int):

    Raises:
        UserError: when IMS_PER_BATCH cannot be split over the ranks that it was made for.

    Returns:
        CfgNode: `cfg` itself, or a scaled copy whose REFERENCE_WORLD_SIZE is `world_size`.
    """
    reference, window = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.ACCUMULATE_STEPS
    if reference == 0 or window == 1:
        return cfg
    if reference < 0 or cfg.SOLVER.IMS_PER_BATCH % reference:
        raise UserError(
            f"SOLVER.REFERENCE_WORLD_SIZE = {reference}: must be 0 (no scaling) or a number of ranks that divides "
            f"SOLVER.IMS_PER_BATCH = {cfg.SOLVER.IMS_PER_BATCH}."
        )
    factor = world_size * window / reference
    frozen, cfg = cfg.is_frozen(), cfg.clone()
    cfg.defrost()
    solver = cfg.SOLVER
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * world_size / reference)
    solver.BASE_LR *= factor
    for name in ("MAX_ITER", "WARMUP_ITERS", "CHECKPOINT_PERIOD"):
        solver[name] = _scaled(solver[name], factor)
    solver.STEPS = tuple(_scaled(step, factor) for step in solver.STEPS)
    cfg.TEST.EVAL_PERIOD = _scaled(cfg.TEST.EVAL_PERIOD, factor)
    solver.REFERENCE_WORLD_SIZE = world_size
    if frozen:
        cfg.freeze()
    logger.info(
        f"Scaled the config from {reference} to {world_size} rank(s) with {window} micro-batches: IMS_PER_BATCH "
        f"{solver.IMS_PER_BATCH} per micro-batch, BASE_LR {solver.BASE_LR:g}, MAX_ITER {solver.MAX_ITER} updates."
    )
    return cfg


def _scaled(iterations, factor):
    """Rounded, and never to 0, which would switch evaluation off or leave nothing to train."""
    return max(round(iterations / factor), 1) if iterations > 0 else iterations
