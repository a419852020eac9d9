"""Loops of a script's own, in which no trainer of this package runs: what they scale, and what they compute in."""

import contextlib
import threading
import weakref

from .. import _compat

_scalers = weakref.WeakSet()  # of the script
_held = contextlib.ExitStack()
_thread = threading.local()


@contextlib.contextmanager
def making_trainer():
    """A context in which a gradient scaler that is made belongs to a trainer of this package."""
    before, _thread.making = getattr(_thread, "making", False), True
    try:
        yield
    finally:
        _thread.making = before


def scaler_init(stock):
    """Of GradScaler.__init__: remembers the scalers that a script makes."""

    def __init__(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        if not getattr(_thread, "making", False):
            _scalers.add(self)

    return __init__


def script_scales():
    """Whether the script has a gradient scaler of its own that is enabled."""
    return any(scaler.is_enabled() for scaler in _scalers)


def hold_switches(policy):
    """Makes fp32 matmuls and convolutions follow the policy until `uninstall`; a loop has no beginning to hook into."""
    before = _compat.tf32_state()
    switches = policy.float32_switches()
    switches.__enter__()
    if _compat.tf32_state() == before:  # nothing to do, or a trainer has set them for as long as it runs
        switches.__exit__(None, None, None)
    else:
        _held.push(switches)


def release_switches():
    """Puts back what `hold_switches` has set."""
    _held.close()


@contextlib.contextmanager
def forgetting():
    """A context at whose end the switches are put back and nothing is remembered."""
    try:
        yield
    finally:
        _held.close()
        _scalers.clear()
