"""Updates that no trainer of this package makes: those that AMP does not reach are told of."""

import contextlib
import logging
import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..step import at_work
from . import current, models

_seen = weakref.WeakSet()  # optimizers that were judged


@contextlib.contextmanager
def watching():
    """A context in which updates that AMP does not reach are told of."""
    handle = register_optimizer_step_pre_hook(_before_step)
    try:
        yield
    finally:
        handle.remove()
        _seen.clear()


def _before_step(optimizer, args, kwargs):
    if at_work() or optimizer in _seen:
        return
    _seen.add(optimizer)
    cfg = current.settings()
    if cfg is None or not cfg.SOLVER.AMP.ENABLED:
        return
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = [model for model in models.served_models() if updated & {id(p) for p in model.parameters()}]
    if any(models.served(model).ran for model in known):
        return
    what = " and ".join(sorted({type(model).__name__ for model in known})) or "a model"
    why = "trained without a call of the model itself" if known else "that d2amp_ext did not see being made"
    current.tell(
        f"AMP is off for the updates of {type(optimizer).__name__}: the script updates {what} {why}. SOLVER.AMP has no "
        "effect on it; if the script has mixed precision of its own, that is what counts.",
        logging.WARNING,
    )
