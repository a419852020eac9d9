"""One update: from losses to an optimizer step or a skip, on one rank or many."""

import contextlib
import threading
from collections.abc import Mapping

import torch

from .errors import UserError
from .guard import NonFiniteError, StepRecord  # noqa: F401
from .guard import agree_on_cause, back_off, global_norm, gradients_of, parameters_of, report_retry, report_skip
from .guard import update_scaler, worst_over_ranks

_thread = threading.local()


def at_work():
    """Whether `amp_step` or `conclude` runs in this thread: forward passes and updates are then made as a policy says."""
    return getattr(_thread, "depth", 0) > 0


@contextlib.contextmanager
def _working():
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


def amp_step(
    losses, optimizer, *, policy, scaler, iteration=0, previous=None, micro_batches=1, after_backward=None, context="", retry=None
):
    """Backward, unscale, check, clip, step or skip, and scaler update.

    All ranks step or all skip. An optimizer that clips inside `step()`, as Detectron2's do, clips true gradients.
    Costs one device read. Gradients are not zeroed here: do it before the first backward of a window.

    Args:
        losses: a scalar Tensor or a dict of them, for one micro-batch; or an iterator that runs the forward pass of
            one micro-batch each time it is advanced and yields such a value (with DistributedDataParallel, from inside
            `model.no_sync()` for all but the last). FloatingPointError from the iterator counts as a non-finite loss.
        optimizer (torch.optim.Optimizer): its parameters hold the gradients.
        policy (PrecisionPolicy): resolved.
        scaler (torch.amp.GradScaler): as `policy.make_scaler()` gives it.
        iteration (int): number of this update, for the record and messages.
        previous (StepRecord or None): the record of the step before, from which counts of skips go on.
        micro_batches (int): how many values `losses` yields; the update uses their mean.
        after_backward (callable or None): called with true gradients in place, before the check.
        context (str or callable): added to the message that ends a run (learning rate, image files ...).
        retry (callable or None): for a policy whose `nonfinite` is "retry_fp32": runs the forward passes of this window
            once more, with the same random state, in fp32; returns what `losses` may be.

    Returns:
        StepRecord

    Raises:
        NonFiniteError: (a FloatingPointError) when the policy gives up; the skip itself is complete by then.
    """
    assert micro_batches >= 1, micro_batches
    device = torch.device(policy.device) if policy.device else parameters_of(optimizer)[0].device
    with _working():
        means, total, cause, failure = _backward_window(losses, scaler, micro_batches, device)

    def again():
        optimizer.zero_grad()
        with _working():
            return _backward_window(retry(), torch.amp.GradScaler(device.type, enabled=False), micro_batches, device)

    return conclude(
        total, means, optimizer, policy=policy, scaler=scaler, iteration=iteration, previous=previous, cause=cause,
        failure=failure, after_backward=after_backward, context=context, retry=again if retry else None,
    )  # fmt: skip


def conclude(
    total, losses, optimizer, *, policy, scaler, iteration, previous, cause=None, failure=None, after_backward=None,
    context="", step=None, retry=None,
):  # fmt: skip
    """The second half of `amp_step`, after the backward passes of a window.

    Args:
        total (Tensor or None): the sum of the losses, an fp32 scalar; None when there was no backward.
        losses (dict[str, Tensor]): for the record.
        optimizer, policy, scaler, iteration, previous, after_backward, context: as for `amp_step`.
        cause (str or None): of a skip that all ranks know of already.
        failure (object): what this rank's forward raised.
        step (callable or None): makes the update when it is not `optimizer.step()`.
        retry (callable or None): runs the backward passes once more in fp32, without a scale; returns (dict of losses,
            total, cause, failure).

    Returns:
        StepRecord
    """
    device = torch.device(policy.device) if policy.device else parameters_of(optimizer)[0].device
    scale = scaler.scale(torch.ones((), device=device))
    norm = None
    if cause is None:
        scaler.unscale_(optimizer)
        norm, cause = _check(total, optimizer, scaler, policy, after_backward, device)
    first, first_failure = cause, failure
    if cause is not None:
        back_off(scaler, policy, cause)
        if retry is not None and _can_retry(cause, policy):
            losses, total, cause, failure = retry()
            if cause is None:
                norm, cause = _check(total, optimizer, scaler, policy, after_backward, device)
    if cause is None:
        with _working():
            (step or optimizer.step)()
        if first is None:
            update_scaler(scaler, policy)
    counts = previous or StepRecord(iteration, False, None, 0, 0, {})
    retried = first is not None and cause is None
    record = StepRecord(
        iteration=iteration,
        skipped=cause is not None,
        cause=cause,
        skips=counts.skips + (cause is not None),
        skips_in_row=counts.skips_in_row + 1 if cause else 0,
        losses=losses,
        grad_norm=norm,
        scale=scale,
        retried=retried,
        retries=counts.retries + retried,
    )
    if retried:
        report_retry(record, policy, first, first_failure)
    if cause is not None:
        report_skip(record, policy, failure, context)
    return record


def _check(total, optimizer, scaler, policy, after_backward, device):
    """The norm of true gradients, and None or the cause of a skip, on which all ranks agree."""
    try:
        if after_backward is not None:
            after_backward()
    except BaseException:
        back_off(scaler, policy, "no_gradient")  # else a caller who goes on finds gradients unscaled already
        raise
    gradients = gradients_of(optimizer)
    norm = global_norm(gradients)
    return norm, agree_on_cause(total, norm, gradients, device)


def _can_retry(cause, policy):
    return policy.nonfinite == "retry_fp32" and policy.precision in ("fp16", "bf16") and cause != "no_gradient"


def _backward_window(losses, scaler, micro_batches, device):
    """Runs backward for every micro-batch.

    Returns:
        (dict, Tensor or None, str or None, object): mean losses, their sum, the cause of a skip that is known already,
        and what a forward of this rank raised.
    """
    if isinstance(losses, (torch.Tensor, dict)):
        losses = iter([losses])
    means, total = {}, None
    with contextlib.closing(losses) if hasattr(losses, "close") else contextlib.nullcontext():
        for number in range(micro_batches):
            loss_dict, failure, obstacle = {}, None, None
            try:
                loss_dict = by_name(next(losses))
            except FloatingPointError as error:
                failure, obstacle = error, "forward"
            except StopIteration as error:
                raise UserError(f"The losses ended after {number} of {micro_batches} micro-batches.") from error
            loss = add_up(loss_dict)
            if obstacle is None and not getattr(loss, "requires_grad", False):
                obstacle = "no_gradient"
            # A rank that has no backward to run would leave the others waiting for it in theirs.
            obstacle = worst_over_ranks(obstacle)
            if obstacle:
                return means, None, obstacle, failure or ("on another rank" if obstacle == "forward" else None)
            if micro_batches > 1:
                loss = loss / micro_batches
            scaler.scale(loss).backward()
            loss = loss.detach().reshape(())
            total = loss if total is None else total + loss
            for name, value in loss_dict.items():
                value = value.detach().to(device, torch.float32).reshape(())
                value = value if micro_batches == 1 else value / micro_batches
                means[name] = means[name] + value if name in means else value
    return means, total, None, None


def add_up(losses):
    """The sum of a dict of losses in fp32, added in the same order as in Detectron2; fp32 losses are summed as they are."""
    return sum(value.float() if value.dtype.itemsize < 4 else value for value in losses.values())


def by_name(losses):
    """What a model returns in training, a loss or a dict of them, as a dict."""
    if isinstance(losses, torch.Tensor):
        return {"total_loss": losses}
    if not isinstance(losses, Mapping):
        raise UserError(
            f"The forward pass returned {type(losses).__name__}; in training it must return a loss, a scalar Tensor, or a "
            "dict of them by name."
        )
    return losses


def describe_step(optimizer, batches):
    """The learning rate and the image files of a step, for the message that ends a run."""
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    text = "Learning rate " + " to ".join(f"{rate:g}" for rate in dict.fromkeys((rates[0], rates[-1]))) + "."
    samples = [sample for batch in batches if isinstance(batch, (list, tuple)) for sample in batch]
    files = [str(sample["file_name"]) for sample in samples if isinstance(sample, dict) and "file_name" in sample]
    return text + (f" Images: {', '.join(files)}." if files else "")
