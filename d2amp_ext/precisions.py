"""The names of precisions, how people spell them, their dtypes, and which of them a device does."""

import difflib
import functools
import logging

import torch

from . import _compat
from .errors import UserError

logger = logging.getLogger(__name__)

# The one dtype table. None: no autocast.
DTYPES = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = ("auto", *DTYPES)

SPELLINGS = {
    **{name: name for name in PRECISIONS},
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16",
    "bfloat16": "bf16", "bf16-mixed": "bf16",
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "no": "fp32",
    "tensorfloat32": "tf32",
}  # fmt: skip


def parse_precision(value, key="SOLVER.AMP.PRECISION"):
    """The canonical name ("auto", "fp32", "tf32", "fp16" or "bf16") of a precision as somebody wrote it.

    Args:
        value (str, int, bool or torch.dtype): a spelling in any case; 16 and 32; False, which is YAML's bare `no`.
        key (str): the setting to name in the error.

    Raises:
        UserError: for anything else, with the valid spellings and the nearest one.
    """
    text = str(value)
    if value is False:
        text = "no"
    elif isinstance(value, torch.dtype):
        text = text.replace("torch.", "")
    text = text.strip().lower()
    if text in SPELLINGS:
        return SPELLINGS[text]
    near = difflib.get_close_matches(text, SPELLINGS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    others = ", ".join(name for name in SPELLINGS if name not in PRECISIONS)
    raise UserError(f"{key} = {value!r} is no precision. Valid: {', '.join(PRECISIONS)} (also {others}).{hint}")


def key_names(name):
    """Both names of a setting: the YAML one and its LazyConfig twin."""
    return f"SOLVER.AMP.{name.upper()} (train.amp.{name.lower()})"


def choose(device, native):
    """What "auto" means on a device: a precision and the reason.

    Args:
        device (torch.device):
        native (frozenset[str]): what it computes in hardware.
    """
    if "bf16" in native:
        return "bf16", "auto: native bf16"
    if "fp16" in native and device.type != "cpu":
        return "fp16", "auto: native fp16 and no native bf16"
    return "fp32", "auto: no native 16-bit arithmetic"


def check_device(precision, device, native, runnable):
    """Raises UserError when a device cannot run a 16-bit precision; warns once when it only emulates it."""
    if precision in native:
        return
    best = [name for name in ("bf16", "fp16") if name in native] or ["fp32"]
    if precision not in runnable or not _compat.autocast_available(device.type):
        raise UserError(f"{key_names('precision')} = {precision!r}: {device} cannot run it. Choose {' or '.join(best)}, or auto.")
    slower = "10 to 60 times slower than fp32, good for tests only" if device.type == "cpu" else "slower than fp32"
    warn_once(
        f"{key_names('precision')} = {precision!r}: {device} has no {precision} arithmetic and emulates it, {slower}. "
        f"Native here: {', '.join(best)}."
    )


@functools.lru_cache(maxsize=None)
def warn_once(message):
    """Logs a warning, the same text only once a process."""
    logger.warning(message)
