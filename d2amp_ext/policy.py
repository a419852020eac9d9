"""The precision of a run, decided once and carried as a value."""

import contextlib
import dataclasses
import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Optional, Tuple

import torch

from . import _compat
from .errors import UnknownKeyError, UserError
from .precisions import DTYPES, PRECISIONS, SPELLINGS  # noqa: F401
from .precisions import check_device, choose, key_names, parse_precision, warn_once

_compat.check_torch()

logger = logging.getLogger(__name__)

NONFINITE = ("skip", "raise", "retry_fp32")
_FP32_MAX = torch.finfo(torch.float32).max  # scales are fp32 tensors
_FP32_TINY = torch.finfo(torch.float32).tiny


def _require(condition, name, value, rule):
    if not condition:
        raise UserError(f"{key_names(name)} = {value!r}: {rule}")


def _require_numbers(options, prefix, **kinds):
    for name, kind in kinds.items():
        value = getattr(options, name)
        what = "a whole number" if kind is Integral else "a number"
        _require(isinstance(value, kind) and not isinstance(value, bool), prefix + name, value, f"must be {what}")


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
        _require_numbers(self, "scaler.", init_scale=Real, growth_factor=Real, backoff_factor=Real,
                         growth_interval=Integral, min_scale=Real, static=Real)  # fmt: skip
        _require(self.growth_factor > 1, "scaler.growth_factor", self.growth_factor,
                 "must be above 1; for a fixed scale set SCALER.STATIC")  # fmt: skip
        _require(0 < self.backoff_factor < 1, "scaler.backoff_factor", self.backoff_factor,
                 "must lie between 0 and 1; for a fixed scale set SCALER.STATIC")  # fmt: skip
        _require(1 <= self.growth_interval < 2**63, "scaler.growth_interval", self.growth_interval,
                 "must be 1 or more updates, and less than 2^63")  # fmt: skip
        _require(_FP32_TINY <= self.min_scale <= _FP32_MAX, "scaler.min_scale", self.min_scale,
                 "must be above 0, and a number that fp32 can hold")  # fmt: skip
        _require(self.min_scale <= self.init_scale <= _FP32_MAX, "scaler.init_scale", self.init_scale,
                 f"must be finite in fp32 and not below SCALER.MIN_SCALE ({self.min_scale})")  # fmt: skip
        _require(self.static == 0 or _FP32_TINY <= self.static <= _FP32_MAX, "scaler.static", self.static,
                 "must be 0 (dynamic) or a scale above 0 that fp32 can hold")  # fmt: skip


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
            object.__setattr__(self, "precision", parse_precision(self.precision, key_names("precision")))
        _require(isinstance(self.scaler, ScalerOptions), "scaler", self.scaler, "must be a ScalerOptions")
        patterns = (self.fp32_modules,) if isinstance(self.fp32_modules, str) else self.fp32_modules
        object.__setattr__(self, "fp32_modules", tuple(patterns))
        for pattern in self.fp32_modules:
            _require(isinstance(pattern, str) and pattern, "fp32_modules", list(self.fp32_modules),
                     "must be names or glob patterns, such as 'roi_heads.*'")  # fmt: skip
        _require_numbers(self, "", max_consecutive_skips=Integral)
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
            return cls(precision="off", reason="TEST.AMP.ENABLED is False")
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
        _require(isinstance(enabled, bool), "enabled", enabled, "must be True or False")
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
            return dataclasses.replace(self, device=str(device), reason=self.reason or "AMP is disabled")
        native, runnable = _compat.native_precisions(device.type, device.index)
        precision, reason = self.precision, "as configured"
        if precision == "auto":
            precision, reason = choose(device, native)
        elif precision in ("fp16", "bf16"):
            check_device(precision, device, native, runnable)
        elif precision == "tf32" and "tf32" not in native:
            warn_once(f"{key_names('precision')} = 'tf32': {device} has no TF32; this run computes in full fp32.")
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
            torch.device(self.device or "cpu").type,  # a policy that is off needs no device
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
        with _compat.tf32_switches(use_tf32):
            yield

    def describe(self):
        """One line for people: precision, device, why, scaler, and what a non-finite step does."""
        if self.precision == "off":
            return f"off ({self.reason or 'AMP is disabled'}): as Detectron2 does it, no autocast, no scaler"
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
LAZY_TRAINER_NAMES = ("bundle_weights", "hold_lr_on_skip", "trainer", "comm_hook", "log_grad_scaler")


def _known(node, names, path):
    if not isinstance(node, Mapping):
        raise UserError(f"{path} = {node!r}: must be a mapping with names such as {names[0]}.")
    options = dict(node)
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
            hint = f" Did you mean {path}.{near[0]}?" if near else ""
            raise UnknownKeyError(f"Unknown key {path}.{name}. Valid under {path}: {', '.join(names)}.{hint}")
    return options
