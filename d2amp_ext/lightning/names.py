"""Lightning's names of precisions: which of our policies each means, and which go past the policy. Needs no Lightning."""

import difflib
import logging

from ..errors import UserError
from ..precisions import PRECISIONS, SPELLINGS

logger = logging.getLogger(__name__)

# Our precision -> the name that a Trainer shows for it.
SHOWN = {"off": "32-true", "auto": "32-true", "fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}

# Lightning's names for what our policy does not do -> as Lightning spells them in full.
PAST_THE_POLICY = {
    "64": "64-true",
    "64-true": "64-true",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
    "transformer-engine": "transformer-engine",
    "transformer-engine-float16": "transformer-engine-float16",
}
# Strategies that take no precision plugin but their own.
OWN_PRECISION = ("fsdp", "deepspeed", "xla", "single_xla", "single_tpu")

# Lightning's names for what our policy does, where they are no spellings of SOLVER.AMP.PRECISION already.
_OURS = {"bf16": "bf16", "16": "fp16", "32": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}


def apply_precision(cfg, value):
    """Sets SOLVER.AMP as `--precision` says, and logs what that was.

    Args:
        cfg (CfgNode): changed in place.
        value (str or None): a name of Lightning's, or a spelling of SOLVER.AMP.PRECISION. None changes nothing.

    Returns:
        str or None: Lightning's name of a precision that goes past the policy; None when the policy decides.

    Raises:
        UserError: for a name that nobody knows, or one against a PRECISION that is set in the config.
    """
    if value is None:
        return None
    name = str(value).strip().lower()
    amp = cfg.SOLVER.AMP
    past = PAST_THE_POLICY.get(name)
    ours = None if past else _parse(value, name)
    configured = SPELLINGS[str(amp.PRECISION).strip().lower()]
    if configured != "auto" and configured != ours:
        raise UserError(
            f"--precision {value} contradicts SOLVER.AMP.PRECISION = {amp.PRECISION!r}. Leave one of the two out."
        )
    before = amp.ENABLED, amp.PRECISION
    amp.ENABLED, amp.PRECISION = (False, "auto") if past else (True, ours)
    changed = [f"SOLVER.AMP.{key} {new}" for key, old, new in
               zip(("ENABLED", "PRECISION"), before, (amp.ENABLED, amp.PRECISION)) if old != new]  # fmt: skip
    text = f"--precision {value}" + (f" set {' '.join(changed)}" if changed else " is what the config says")
    if past:
        logger.warning(
            f"--precision {value}: Lightning's {past} converts the model itself and goes past our policy"
            f"{f' (set {changed[0]})' if changed else ''}. No gradient scaling, no skipped steps, none of the other keys "
            "of SOLVER.AMP; and most of Detectron2's models cannot do it, for they mix such tensors with fp32 ones."
        )
    else:
        logger.info(f"{text}: in Lightning's words {SHOWN[ours]}.")
    return past


def leave_to_strategy(cfg, strategy, policy):
    """Turns SOLVER.AMP off where a strategy has a precision of its own, which then computes in what the policy says.

    Args:
        cfg (CfgNode): changed in place.
        strategy (str): a name of Lightning's.
        policy (PrecisionPolicy): of training, not resolved.

    Returns:
        str or None: Lightning's name of the precision for that strategy; None where the policy decides.

    Raises:
        UserError: for micro-batches, which need our policy.
    """
    if policy.precision == "off" or not strategy.lower().startswith(OWN_PRECISION):
        return None
    if cfg.SOLVER.ACCUMULATE_STEPS > 1:
        raise UserError(
            f"--strategy {strategy} has a precision of its own, without which SOLVER.ACCUMULATE_STEPS = "
            f"{cfg.SOLVER.ACCUMULATE_STEPS} cannot be guarded. Set it to 1, or choose --strategy ddp."
        )
    cfg.SOLVER.AMP.ENABLED = False
    shown = SHOWN[policy.resolve(cfg.MODEL.DEVICE, "Precision of training").precision]
    logger.warning(
        f"--strategy {strategy} has a precision of its own: it computes in {shown}, as SOLVER.AMP.PRECISION "
        f"{cfg.SOLVER.AMP.PRECISION} says (set SOLVER.AMP.ENABLED False). Its gradient scaler is its own, and no step is "
        "skipped; no other key of SOLVER.AMP has an effect. With --strategy ddp they have."
    )
    return shown


def _parse(value, name):
    known = {**SPELLINGS, **_OURS}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, [*known, *PAST_THE_POLICY], n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    lightnings = ", ".join([*_OURS, *PAST_THE_POLICY])
    raise UserError(f"--precision {value} is no precision. Valid: {', '.join(PRECISIONS)}; Lightning's: {lightnings}.{hint}")
