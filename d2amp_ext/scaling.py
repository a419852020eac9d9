"""SOLVER.REFERENCE_WORLD_SIZE with gradient accumulation."""

import logging

logger = logging.getLogger(__name__)


def scale_to_world(cfg, world_size):
    """The cfg for `world_size` ranks and SOLVER.ACCUMULATE_STEPS, from one made for SOLVER.REFERENCE_WORLD_SIZE.

    The images per rank and micro-batch stay. The LR grows with the images per update, ranks times micro-batches; the
    numbers of iterations shrink by the same factor. Without accumulation Detectron2 does this itself, and the cfg is
    returned as it is.

    Args:
        cfg (CfgNode): not changed.
        world_size (int):

    Returns:
        CfgNode: `cfg` itself, or a scaled copy whose REFERENCE_WORLD_SIZE is `world_size`.
    """
    reference, window = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.ACCUMULATE_STEPS
    if reference == 0 or window == 1:
        return cfg
    factor = world_size * window / reference
    frozen, cfg = cfg.is_frozen(), cfg.clone()
    cfg.defrost()
    solver = cfg.SOLVER
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * world_size / reference)
    solver.BASE_LR *= factor
    for name in ("MAX_ITER", "WARMUP_ITERS", "CHECKPOINT_PERIOD"):
        solver[name] = round(solver[name] / factor)
    solver.STEPS = tuple(round(step / factor) for step in solver.STEPS)
    cfg.TEST.EVAL_PERIOD = round(cfg.TEST.EVAL_PERIOD / factor)
    solver.REFERENCE_WORLD_SIZE = world_size
    if frozen:
        cfg.freeze()
    logger.info(
        f"Scaled the config from {reference} to {world_size} rank(s) with {window} micro-batches: IMS_PER_BATCH "
        f"{solver.IMS_PER_BATCH} per micro-batch, BASE_LR {solver.BASE_LR:g}, MAX_ITER {solver.MAX_ITER} updates."
    )
    return cfg
