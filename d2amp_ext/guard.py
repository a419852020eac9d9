"""The guard of a step: what happened is agreed on by all ranks, recorded, and told."""

import logging
import math
from dataclasses import dataclass
from typing import Dict, Optional

import torch
import torch.distributed as dist
from detectron2.utils import comm

from . import _compat

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What one step did. Tensors are detached and stay on their devices, so that keeping a record waits for nothing.

    Attributes:
        iteration (int): the update that was tried, from 0.
        skipped (bool): whether it was skipped.
        cause (str or None): None, or why it was skipped: "loss" (a loss was not finite), "gradient", "forward" (the
            forward pass itself raised FloatingPointError), "no_gradient" (no parameter has one).
        skips (int): skipped updates so far, this one included.
        skips_in_row (int): skipped updates in a row up to this one; 0 after an update.
        retried (bool): whether this update was made from a second forward in fp32, because the first was not finite.
        retries (int): such updates so far.
        losses (dict[str, Tensor]): the losses by name, fp32 scalars, averaged over the window's micro-batches. Without
            those of a forward that raised.
        grad_norm (Tensor or None): the L2 norm of all unscaled gradients before clipping, an fp32 scalar; infinite or
            NaN when they are not finite, None when there was no backward or no gradient.
        scale (Tensor): the gradient scale of this step, an fp32 scalar; 1 without a scaler.
    """

    iteration: int
    skipped: bool
    cause: Optional[str]
    skips: int
    skips_in_row: int
    losses: Dict[str, torch.Tensor]
    grad_norm: Optional[torch.Tensor] = None
    scale: Optional[torch.Tensor] = None
    retried: bool = False
    retries: int = 0


class NonFiniteError(FloatingPointError):
    """Training gave up: a step was not finite and the policy says "raise", or too many in a row were skipped.

    Attributes:
        record (StepRecord): the last step.
    """

    def __init__(self, message, record):
        super().__init__(message)
        self.record = record

    def __reduce__(self):  # so that it gets out of a worker process
        return type(self), (self.args[0], self.record)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer):
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]


@torch.no_grad()
def global_norm(gradients):
    if not gradients:
        return None
    target = gradients[0].device
    norms = _compat.gradient_norms(gradients)
    return torch.linalg.vector_norm(torch.stack([norm if norm.device == target else norm.to(target) for norm in norms]))


def agree_on_cause(total, norm, gradients, device):
    """None, or why this step must be skipped, the same on every rank. The one device read of a step."""
    has_gradient = norm is not None
    values = torch.stack([total.to(device), norm.to(device) if has_gradient else torch.zeros((), device=device)])
    if comm.get_world_size() == 1:
        loss_bad, gradient_bad = (not math.isfinite(value) for value in values.tolist())
    else:
        flags = torch.cat([~torch.isfinite(values), torch.full((1,), has_gradient, device=device)]).float()
        loss_bad, gradient_bad, has_gradient = _max_over_ranks(flags).tolist()
    if loss_bad:
        return "loss"
    if gradient_bad:
        # Squares of large finite gradients overflow the norm: look at the values themselves before dropping a step.
        bad = [~torch.isfinite(gradient).all().to(device) for gradient in gradients]
        flag = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
        return "gradient" if _max_over_ranks(flag[None]).item() else None
    return None if has_gradient else "no_gradient"


def _max_over_ranks(flags):
    if comm.get_world_size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags


def worst_over_ranks(obstacle):
    """"forward" or "no_gradient" if that is the obstacle on any rank, else None. Waits for ranks, not for a device."""
    obstacles = comm.all_gather(obstacle)  # over gloo, on the host
    return next((name for name in ("forward", "no_gradient") if name in obstacles), None)


def update_scaler(scaler, policy):
    if scaler.is_enabled():
        scaler.update(policy.scaler.static or None)


def back_off(scaler, policy, cause):
    """Lowers the scale after a skip, on this rank as on the others, whether or not its own gradients overflowed.

    With public calls only: the state is read and loaded, which costs reads in a skipped step and none in others.
    """
    if not scaler.is_enabled():
        return
    state = scaler.state_dict()
    if policy.scaler.static:
        state["scale"] = policy.scaler.static
    elif cause != "no_gradient":
        floor = min(policy.scaler.min_scale, state["scale"])  # a scaler of the user's may start below it
        state["scale"] = max(state["scale"] * state["backoff_factor"], floor)
        state["_growth_tracker"] = 0
    scaler.update(state["scale"])  # with a value, it forgets that gradients were unscaled and asks for no check of them
    scaler.load_state_dict(state)


_CAUSES = {
    "loss": "a loss is not finite",
    "gradient": "a gradient is not finite",
    "forward": "the forward pass met values that are not finite",
    "no_gradient": "no parameter has a gradient",
}


def report_retry(record, policy, cause, failure):
    reason = _CAUSES[cause] + (f" ({failure})" if failure else "")
    logger.warning(
        f"Made the update of iteration {record.iteration} in fp32, for in {policy.precision} {reason}; "
        f"{record.retries} such update(s) so far."
    )


def report_skip(record, policy, failure, context):
    text = f"iteration {record.iteration}: {_CAUSES[record.cause]}" + (f" ({failure})" if failure else "")
    bad = [name for name, value in record.losses.items() if not torch.isfinite(value)]
    if bad:
        text += f" ({', '.join(bad)})"
    scale = f", gradient scale {record.scale.item():g}" if policy.precision == "fp16" else ""
    counts = f"{record.skips} skipped so far, {record.skips_in_row} in a row"
    if policy.nonfinite != "raise" and record.skips_in_row <= policy.max_consecutive_skips:
        logger.warning(f"Skipped the update of {text}{scale}; {counts}.")
        return
    why = (
        "SOLVER.AMP.NONFINITE is 'raise'"
        if policy.nonfinite == "raise"
        else f"more than SOLVER.AMP.MAX_CONSECUTIVE_SKIPS = {policy.max_consecutive_skips} in a row"
    )
    advice = {
        "fp16": "Try SOLVER.AMP.PRECISION bf16 or fp32, a lower SOLVER.BASE_LR, or a longer warm-up.",
        "bf16": "Try SOLVER.AMP.PRECISION fp32, a lower SOLVER.BASE_LR, or a longer warm-up.",
    }.get(policy.precision, "Try a lower SOLVER.BASE_LR, a longer warm-up, or SOLVER.CLIP_GRADIENTS; check the data.")
    if record.cause == "no_gradient":
        advice = "Check which parameters are frozen and that the losses depend on the others."
    details = context() if callable(context) else context
    raise NonFiniteError(
        f"Training stopped at {text}; {why}. Precision {policy.precision}{scale}; {counts}."
        f"{' ' + details if details else ''} {advice}",
        record,
    )
