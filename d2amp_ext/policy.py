"""The precision of a run, decided once and carried as a value."""

import contextlib
import dataclasses
import difflib
import functools
import logging
from dataclasses import dataclass, field
from typing import Optional, Tuple

import torch

from . import _compat
from .errors import UnknownKeyError, UserError

_compat.check_torch()

logger = logging.getLogger(__name__)

# The one dtype table. None: no autocast.
DTYPES = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = ("auto", *DTYPES)
NONFINITE = ("skip", "raise", "retry_fp32")

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


def _key(name):
    """Both names of a setting: the YAML one and its LazyConfig twin."""
    return f"SOLVER.AMP.{name.upper()} (train.amp.{name.lower()})"


def _require(condition, name, value, rule):
    if not condition:
        raise UserError(f"{_key(name)} = {value!r}: {rule}")


@dataclass(frozen=True)
class ScalerOptions:
    """Options of the gradient scaler, which only fp16 uses. Field names are those of torch.amp.GradScaler.

    Attributes:
        init_scale (float): the first scale.
        growth_factor (float): multiplies the scale after `growth_interval` good updates. Above 1.
        backoff_factor (float): multiplies the scale after an overflow. Between 0 and 1.
        growth_interval (int): good updates in a row between two growths.
        min_scale (float): the scale never falls below it.
        static (float): a fixed scale when above 0; 0 means dynamic scaling.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    static: float = 0.0

    def __post_init__(self):
        _require(self.growth_factor > 1, "scaler.growth_factor", self.growth_factor,
                 "must be above 1; for a fixed scale set SCALER.STATIC")  # fmt: skip
        _require(0 < self.backoff_factor < 1, "scaler.backoff_factor", self.backoff_factor,
                 "must lie between 0 and 1; for a fixed scale set SCALER.STATIC")  # fmt: skip
        _require(self.growth_interval >= 1, "scaler.growth_interval", self.growth_interval, "must be 1 or more updates")
        _require(0 < self.min_scale < float("inf"), "scaler.min_scale", self.min_scale, "must be above 0")
        _require(self.min_scale <= self.init_scale < float("inf"), "scaler.init_scale", self.init_scale,
                 f"must be finite and not below SCALER.MIN_SCALE ({self.min_scale})")  # fmt: skip
        _require(0 <= self.static < float("inf"), "scaler.static", self.static, "must be 0 (dynamic) or a scale above 0")


@dataclass(frozen=True)
class PrecisionPolicy:
    """What runs in which precision, and what happens when a step is not finite.

    A policy from `from_cfg`, `from_lazy` or the constructor may say "auto" and belongs to no device;
    `resolve(device)` returns one that does.

    Attributes:
        precision (str): "auto", "fp32", "tf32", "fp16", "bf16"; "off" when AMP is disabled. Other spellings are
            accepted by the constructor and stored under these names.
        scaler (ScalerOptions): used by fp16 only.
        nonfinite (str): "skip", "raise" or "retry_fp32".
        max_consecutive_skips (int): more skipped updates in a row end the run.
        fp32_modules (tuple[str]): glob patterns of modules that stay in fp32. Empty means none.
        shield (bool): whether operators known to be wrong or missing in 16 bit run in fp32.
        device (str or None): what it was resolved for. None: not resolved yet.
        reason (str): why `resolve` chose this precision.
    """

    precision: str = "auto"
    scaler: ScalerOptions = ScalerOptions()
    nonfinite: str = "skip"
    max_consecutive_skips: int = 20
    fp32_modules: Tuple[str, ...] = ()
    shield: bool = True
    device: Optional[str] = field(default=None, compare=False)
    reason: str = field(default="", compare=False)

    def __post_init__(self):
        if self.precision != "off":
            object.__setattr__(self, "precision", parse_precision(self.precision, _key("precision")))
        object.__setattr__(self, "fp32_modules", tuple(self.fp32_modules))
        _require(self.nonfinite in NONFINITE, "nonfinite", self.nonfinite, f"must be one of {', '.join(NONFINITE)}")
        _require(self.max_consecutive_skips >= 0, "max_consecutive_skips", self.max_consecutive_skips,
                 "must be 0 or more")  # fmt: skip

    # Building

    @classmethod
    def from_cfg(cls, cfg):
        """The policy of training in a Detectron2 CfgNode that has the keys of `add_amp_config`. Not resolved."""
        amp = cfg.SOLVER.AMP
        if not amp.ENABLED:
            return cls(precision="off")
        if "PRECISION" not in amp:
            raise UnknownKeyError("The config has no SOLVER.AMP.PRECISION. Call d2amp_ext.add_amp_config(cfg) first.")
        return cls.from_amp_node(amp)

    @classmethod
    def from_amp_node(cls, amp):
        """The policy that a SOLVER.AMP node asks for when enabled, whether it is or not. Not resolved."""
        return cls(
            precision=amp.PRECISION,
            scaler=ScalerOptions(**{name.lower(): value for name, value in amp.SCALER.items()}),
            nonfinite=amp.NONFINITE,
            max_consecutive_skips=amp.MAX_CONSECUTIVE_SKIPS,
            fp32_modules=amp.FP32_MODULES,
            shield=amp.SHIELD,
        )

    @classmethod
    def for_evaluation(cls, cfg):
        """The policy of evaluation, from TEST.AMP. Not resolved."""
        amp = cfg.TEST.AMP
        if not amp.ENABLED:
            return cls(precision="off")
        precision = parse_precision(amp.PRECISION, "TEST.AMP.PRECISION")
        return cls(precision=precision, fp32_modules=cfg.SOLVER.AMP.FP32_MODULES, shield=cfg.SOLVER.AMP.SHIELD)

    @classmethod
    def from_lazy(cls, amp):
        """The policy of a LazyConfig's `train.amp` node (or any mapping with lower-case names). Not resolved.

        Raises:
            UnknownKeyError: for a name that is not one of ours, with the nearest match.
        """
        names = [f.name for f in dataclasses.fields(cls) if f.name not in ("device", "reason")]
        options = _known(amp, ["enabled", *LAZY_TRAINER_NAMES, *names], "train.amp")
        enabled = options.pop("enabled", False)
        scaler = options.pop("scaler", None) or {}
        scaler_names = [f.name for f in dataclasses.fields(ScalerOptions)]
        scaler = ScalerOptions(**_known(scaler, scaler_names, "train.amp.scaler"))
        if not enabled:
            return cls(precision="off")
        options = {name: value for name, value in options.items() if name in names}
        return cls(scaler=scaler, **options)

    def resolve(self, device, purpose="Precision"):
        """A policy for `device` (str, int or torch.device), with "auto" replaced by what the device does natively.

        Logs what it came to and why in one line.

        Raises:
            UserError: when the device cannot run an explicit choice.
        """
        if self.device == str(torch.device(device)):
            return self
        policy = self._resolve(torch.device(device))
        logger.info(f"{purpose}: {policy.describe()}")
        return policy

    def check(self, device):
        """Raises the UserError that `resolve` would raise; logs nothing but warnings."""
        self._resolve(torch.device(device))

    def _resolve(self, device):
        if self.precision == "off":
            return dataclasses.replace(self, device=str(device), reason="AMP is disabled")
        native, runnable = _compat.native_precisions(device.type, device.index)
        precision, reason = self.precision, "as configured"
        if precision == "auto":
            precision, reason = _choose(device, native)
        elif precision in ("fp16", "bf16"):
            _check_device(precision, device, native, runnable)
        elif precision == "tf32" and "tf32" not in native:
            warn_once(f"{_key('precision')} = 'tf32': {device} has no TF32; this run computes in full fp32.")
        return dataclasses.replace(self, precision=precision, device=str(device), reason=reason)

    # Using

    @property
    def dtype(self):
        """The 16-bit dtype of autocast as torch.dtype; torch.float32 for fp32 and tf32; None when AMP is off."""
        if self.precision == "off":
            return None
        return DTYPES[self._resolved("dtype").precision] or torch.float32

    @property
    def uses_scaler(self):
        """Whether gradients are scaled (fp16 only)."""
        return self._resolved("uses_scaler").precision == "fp16"

    def autocast(self):
        """A context for forward passes. It does nothing when AMP is off, and turns autocast off for fp32 and tf32."""
        if self._resolved("autocast()").precision == "off":
            return contextlib.nullcontext()
        device_type, dtype = torch.device(self.device).type, DTYPES[self.precision]
        if not _compat.autocast_available(device_type):
            return contextlib.nullcontext()
        if dtype is None and not torch.is_autocast_enabled(device_type):
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)

    def make_scaler(self):
        """A fresh torch.amp.GradScaler; a disabled one, on which every call works, unless the precision is fp16."""
        options = self._resolved("make_scaler()").scaler
        return torch.amp.GradScaler(
            torch.device(self.device).type,
            init_scale=options.static or options.init_scale,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
            enabled=self.uses_scaler,
        )

    @contextlib.contextmanager
    def float32_switches(self):
        """A context in which fp32 matmuls and convolutions follow the policy: TF32 on for tf32, off for fp32.

        The 16-bit precisions and "off" leave the switches alone. The former state comes back at the end.
        """
        precision = self._resolved("float32_switches()").precision
        if precision not in ("fp32", "tf32"):
            yield
            return
        device = torch.device(self.device)
        use_tf32 = precision == "tf32" and "tf32" in _compat.native_precisions(device.type, device.index)[0]
        # These two switches, unlike the newer fp32_precision ones, leave every getter of torch readable.
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        try:
            torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = use_tf32
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]

    def describe(self):
        """One line for people: precision, device, why, scaler, and what a non-finite step does."""
        if self.precision == "off":
            return "off (AMP is disabled): as Detectron2 does it, no autocast, no scaler"
        where = f" on {self.device} ({self.reason})" if self.device else " (not resolved)"
        text = f"{self.precision}{where}"
        if self.precision == "fp16":
            static = self.scaler.static
            text += f", static scale {static:g}" if static else f", dynamic scale from {self.scaler.init_scale:g}"
            text += "" if static else f" to no less than {self.scaler.min_scale:g}"
        elif self.precision != "auto":
            text += ", no gradient scaler"
        text += f", non-finite steps: {self.nonfinite}, at most {self.max_consecutive_skips} in a row"
        if self.fp32_modules:
            text += f", fp32 modules: {', '.join(self.fp32_modules)}"
        return text

    def _resolved(self, what):
        if self.precision == "auto" or (self.device is None and self.precision != "off"):
            raise RuntimeError(
                f"PrecisionPolicy.{what}: the policy ({self.precision}) is not resolved. "
                "Use the one that policy.resolve(device) returns."
            )
        return self


# Names under train.amp that concern the trainer, not the policy.
LAZY_TRAINER_NAMES = ("hold_lr_on_skip", "trainer", "comm_hook", "log_grad_scaler")


def _known(node, names, path):
    options = dict(node)
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
            hint = f" Did you mean {path}.{near[0]}?" if near else ""
            raise UnknownKeyError(f"Unknown key {path}.{name}. Valid under {path}: {', '.join(names)}.{hint}")
    return options


def _choose(device, native):
    if "bf16" in native:
        return "bf16", "auto: native bf16"
    if "fp16" in native and device.type != "cpu":
        return "fp16", "auto: native fp16 and no native bf16"
    return "fp32", "auto: no native 16-bit arithmetic"


def _check_device(precision, device, native, runnable):
    if precision in native:
        return
    best = [name for name in ("bf16", "fp16") if name in native] or ["fp32"]
    if precision not in runnable or not _compat.autocast_available(device.type):
        raise UserError(f"{_key('precision')} = {precision!r}: {device} cannot run it. Choose {' or '.join(best)}, or auto.")
    slower = "10 to 60 times slower than fp32, good for tests only" if device.type == "cpu" else "slower than fp32"
    warn_once(
        f"{_key('precision')} = {precision!r}: {device} has no {precision} arithmetic and emulates it, {slower}. "
        f"Native here: {', '.join(best)}."
    )


@functools.lru_cache(maxsize=None)
def warn_once(message):
    """Logs a warning, the same text only once a process."""
    logger.warning(message)
