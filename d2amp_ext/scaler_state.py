"""The state of a gradient scaler in checkpoints, from every precision into every other."""

import logging

logger = logging.getLogger(__name__)


def to_save(scaler, options, unused=None):
    """What a checkpoint says about a scaler. Never empty, which stock Detectron2 could not load.

    Args:
        scaler (torch.amp.GradScaler): a disabled one where the precision needs none.
        options (ScalerOptions):
        unused (dict or None): what `load` returned, which a precision without a scaler passes on.
    """
    if scaler.is_enabled():
        return scaler.state_dict()
    # Never STATIC's values: a stock AMPTrainer that loads this must get a scaler that can move.
    return unused or {
        "scale": options.init_scale,
        "growth_factor": options.growth_factor,
        "backoff_factor": options.backoff_factor,
        "growth_interval": options.growth_interval,
        "_growth_tracker": 0,
    }


def load(scaler, options, saved):
    """Takes the scale and its growth counter from a checkpoint; the settings stay those of the scaler.

    Args:
        saved (dict or None): what a checkpoint says, if anything.

    Returns:
        dict or None: `saved`, when the precision has no use for it.
    """
    if not scaler.is_enabled():
        return saved or None
    if not saved:
        logger.info(f"The checkpoint has no gradient scaler state; starting at {scaler.get_scale():g}.")
    elif not options.static:
        scale = max(float(saved["scale"]), options.min_scale)
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": saved["_growth_tracker"]})
    return None
