"""What is checked before a model is built, so that a mistake costs a second and not an hour."""

import math
import os
import tempfile
from pathlib import Path

from .checkpoint import check_weights
from .config import check_cfg
from .data.register import check_datasets, register_datasets
from .errors import UserError
from .policy import PrecisionPolicy

# What a run writes into OUTPUT_DIR from its start on.
_FILES = ("log.txt", "metrics.json", "config.yaml", "config_stock.yaml", "last_checkpoint")


def check_run(cfg, train=True, resume=False, world_size=1):
    """Raises UserError for what would stop the run later.

    Args:
        cfg (CfgNode):
        train (bool): False for evaluation only.
        resume (bool): whether OUTPUT_DIR may hold the weights.
        world_size (int): ranks of the run.
    """
    check_cfg(cfg)
    PrecisionPolicy.from_cfg(cfg).check(cfg.MODEL.DEVICE)
    PrecisionPolicy.for_evaluation(cfg).check(cfg.MODEL.DEVICE)
    if train:
        _check_schedule(cfg, world_size)
    register_datasets(cfg)
    check_datasets(cfg, train=train)
    if not (resume and _has_checkpoint(cfg.OUTPUT_DIR)):
        check_weights(cfg.MODEL.WEIGHTS)


def _check_schedule(cfg, world_size):
    if cfg.SOLVER.MAX_ITER < 1:
        raise UserError(f"SOLVER.MAX_ITER = {cfg.SOLVER.MAX_ITER}: must be 1 or more updates. To evaluate: --eval-only.")
    # With REFERENCE_WORLD_SIZE the batch is that of as many ranks, and grows or shrinks with those of the run.
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    ranks, whose = (reference, "SOLVER.REFERENCE_WORLD_SIZE") if reference > 0 else (world_size, "this run")
    if cfg.SOLVER.IMS_PER_BATCH < 1 or cfg.SOLVER.IMS_PER_BATCH % ranks:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH = {cfg.SOLVER.IMS_PER_BATCH}: must be a multiple of the {ranks} rank(s) of {whose}, "
            "which share it."
        )
    if not 0 < cfg.SOLVER.BASE_LR < math.inf:
        raise UserError(f"SOLVER.BASE_LR = {cfg.SOLVER.BASE_LR}: must be above 0.")
    if cfg.SOLVER.CHECKPOINT_PERIOD < 1:
        raise UserError(
            f"SOLVER.CHECKPOINT_PERIOD = {cfg.SOLVER.CHECKPOINT_PERIOD}: must be 1 or more updates. A number above "
            "SOLVER.MAX_ITER leaves the checkpoint at the end only."
        )


def check_output(folder):
    """Raises UserError when OUTPUT_DIR is not and cannot become a folder with files of ours. Leaves nothing behind."""
    if "://" in folder:
        return
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
        for name in _FILES:
            path = Path(folder, name)
            if path.exists():  # an earlier run's, to which this one adds or which it replaces
                with open(path, "ab"):
                    pass
    except OSError as error:
        raise UserError(f"OUTPUT_DIR = {folder!r} cannot be written: {error}. Set it to a folder that can.") from error


def _has_checkpoint(folder):
    return os.path.isfile(os.path.join(folder, "last_checkpoint")) or any(Path(folder).glob("model_*.pth"))
