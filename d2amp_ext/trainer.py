"""AMPTrainer: Detectron2's, in any precision, on any device. It takes explicit arguments and knows no cfg."""

import contextlib
import dataclasses
import logging
import math
import time

import torch
from detectron2.engine import AMPTrainer as _AMPTrainer
from detectron2.engine import SimpleTrainer
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils import comm
from fvcore.common.registry import Registry
from torch.nn.parallel import DataParallel, DistributedDataParallel

from . import _compat, random_state, scaler_state
from .errors import UserError
from .metrics import MetricBuffer
from .numerics.investigate import Investigator
from .numerics.protect import protect
from .numerics.shield import report_frozen_scales
from .numerics.statistics import RunningStatistics
from .policy import PrecisionPolicy
from .step import NonFiniteError, StepRecord, amp_step, describe_step

logger = logging.getLogger(__name__)

TRAINER_REGISTRY = Registry("TRAINER")
TRAINER_REGISTRY.__doc__ = """
Callables that make the inner trainer of a run with AMP, by the name in SOLVER.AMP.TRAINER. Called as
`(model, data_loader, optimizer, *, policy, accumulate_steps=1, **stock arguments)`; must return a SimpleTrainer.
"""


@TRAINER_REGISTRY.register()
class AMPTrainer(_AMPTrainer):
    """Like Detectron2's AMPTrainer, with a precision policy, gradient accumulation and a guard.

    Differences that a subclass or hook can see: `after_backward` hooks find unscaled gradients; losses reach the
    EventStorage every `gather_metric_period` iterations, none dropped; a step that is not finite is skipped and
    recorded instead of ending the run.

    Attributes:
        policy (PrecisionPolicy): resolved for the model's device.
        protection (Protection): what of the model stays in fp32.
        last_step (StepRecord or None): the step just made.
        investigator (Investigator): looks into steps that are not finite; `write_bundles` of it says where to.
        accumulate_steps (int): micro-batches per update.
        max_iter (int or None): set by whoever runs the loop, so that the last step's losses are written.
    """

    def __init__(
        self,
        model,
        data_loader,
        optimizer,
        gather_metric_period=1,
        zero_grad_before_forward=False,
        grad_scaler=None,
        precision=None,
        log_grad_scaler=False,
        async_write_metrics=False,
        *,
        policy=None,
        accumulate_steps=1,
    ):
        """
        Args:
            model, data_loader, optimizer, gather_metric_period, zero_grad_before_forward, log_grad_scaler: as in
                Detectron2's AMPTrainer. One update takes `accumulate_steps` items of the data loader.
            grad_scaler (torch.amp.GradScaler or None): a scaler to use instead of the policy's. For fp16.
            precision (torch.dtype, str or None): a precision instead of a policy; float16 with a `grad_scaler`.
            async_write_metrics (bool): kept for code that sets it. Losses never wait for the device here, and a loss
                that is not finite is noticed in its own step either way.
            policy (PrecisionPolicy or None): None means "auto". Resolved here when it is not yet.
            accumulate_steps (int): micro-batches per update.

        Raises:
            ValueError: for a policy together with `precision` or `grad_scaler`, a grad_scaler without fp16, a policy
                that is off, and `accumulate_steps` below 1.
        """
        if isinstance(model, DataParallel) or len(getattr(model, "device_ids", None) or ()) > 1:
            raise ValueError("AMPTrainer supports one device per process. Use DistributedDataParallel, not DataParallel.")
        if accumulate_steps < 1:
            raise UserError(f"accumulate_steps = {accumulate_steps}: must be 1 or more micro-batches per update.")
        policy = _policy_from(policy, precision, grad_scaler).resolve(_device_of(model))
        grad_scaler = grad_scaler or policy.make_scaler()
        self.protection = protect(model, policy)
        stock = {
            "gather_metric_period": gather_metric_period,
            "zero_grad_before_forward": zero_grad_before_forward,
            "grad_scaler": grad_scaler,
            "precision": policy.dtype,
            "log_grad_scaler": log_grad_scaler,
        }
        super().__init__(model, data_loader, optimizer, **_compat.supported_kwargs(_AMPTrainer.__init__, stock))
        for name, value in stock.items():
            setattr(self, name, value)  # an older Detectron2 does not take all of them
        self.async_write_metrics = async_write_metrics
        self.policy = policy
        self.accumulate_steps = accumulate_steps
        self.last_step = None
        self.investigator = Investigator(model, optimizer, policy)
        self._statistics = RunningStatistics(model)
        self._fp32 = dataclasses.replace(policy, precision="fp32")
        self._skips = None  # the StepRecord that counts of skips go on from; survives a resume
        self.max_iter = None
        self._metrics = MetricBuffer()
        # What a precision without a scaler passes on to the next checkpoint, so that fp16 can resume from it.
        self._unused_scaler_state = None

    def train(self, start_iter, max_iter):
        """Trains from `start_iter` to `max_iter`, with the TF32 switches as the policy says."""
        with self.policy.float32_switches():
            super().train(start_iter, max_iter)

    def describe(self):
        """One line for people: the precision and why, and what of this model stays in fp32. Logged when it was made."""
        kept = self.protection.describe() if self.policy.dtype is not torch.float32 else ""
        return "; ".join(filter(None, [self.policy.describe(), kept]))

    def before_train(self):
        self.get_ready(self._hooks)
        super().before_train()

    def get_ready(self, hooks):
        """Before the first step, with weights loaded: looks at these, and makes losses arrive before any writer writes.

        Every rank must call it.

        Args:
            hooks (list[HookBase]): of the trainer that runs the loop; only the main rank has writers.
        """
        report_frozen_scales(self.model)
        periods = [hook._period for hook in hooks if isinstance(hook, PeriodicWriter)]
        periods = [period for rank in comm.all_gather(periods) for period in rank]
        self.gather_metric_period = math.gcd(self.gather_metric_period, *periods)

    def after_train(self):
        self.flush_metrics(gather=self.iter == self.max_iter)
        super().after_train()

    def run_step(self):
        assert self.model.training, "[AMPTrainer] model was changed to eval mode!"
        start = time.perf_counter()
        batches = [next(self._data_loader_iter) for _ in range(self.accumulate_steps)]
        data_time = time.perf_counter() - start
        self._statistics.save()
        can_retry = self.policy.nonfinite == "retry_fp32"
        before = random_state.snapshot()  # with the batches, all that a step which goes wrong is made again from
        try:
            record = amp_step(
                self._forward_window(batches),
                self.optimizer,
                policy=self.policy,
                scaler=self.grad_scaler,
                iteration=self.iter,
                previous=self._skips,
                micro_batches=self.accumulate_steps,
                after_backward=getattr(self, "after_backward", None),
                context=lambda: describe_step(self.optimizer, batches),
                retry=(lambda: self._forward_again(batches, before)) if can_retry else None,
            )
        except NonFiniteError as error:
            self._statistics.restore()
            self.last_step = self._skips = error.record
            self.investigator.explain(error, batches, before)
            raise
        if record.skipped:
            self._statistics.restore()
            self.investigator.after_skip(record, batches, before)
        self.keep(record, data_time)

    def keep(self, record, data_time):
        """Takes note of the step that was made; its losses are written when they are due.

        Args:
            record (StepRecord): of iteration `self.iter`.
            data_time (float): seconds that this rank waited for data.
        """
        self.last_step = self._skips = record
        extra = {"[metric]grad_scaler": record.scale} if self.log_grad_scaler else None
        self._metrics.add(record, data_time, extra)
        if (self.iter + 1) % self.gather_metric_period == 0 or self.iter + 1 == self.max_iter:
            self.flush_metrics()

    def flush_metrics(self, gather=True):
        """Writes the losses of all steps since the last time. With `gather`, every rank must call it."""
        self._metrics.flush(gather)

    def _forward_again(self, batches, before):
        """The same window in fp32, from the same random state and running statistics."""
        random_state.restore(random_state.plain(before))
        self._statistics.restore()
        with self._fp32.float32_switches():
            yield from self._forward_window(batches, self._fp32)

    def _forward_window(self, batches, policy=None):
        """Yields the losses of one micro-batch after another; the caller runs backward in between."""
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        # A window given up on one rank leaves DDP of the others waiting for a backward, which no_sync() would not end:
        # after it, every micro-batch is reduced once. DDP's static graph cannot leave out a reduction at all.
        is_retry = policy is not None
        reduce_all = is_retry or self.last_step is not None and self.last_step.cause in ("forward", "no_gradient")
        is_ddp = isinstance(self.model, DistributedDataParallel)
        can_defer = is_ddp and not reduce_all and not self.model.static_graph
        for number, batch in enumerate(batches, 1):
            defer = can_defer and number < len(batches)
            with self.model.no_sync() if defer else contextlib.nullcontext():
                with (policy or self.policy).autocast():
                    losses = self.model(batch)
                if number == 1 and not self.zero_grad_before_forward:
                    self.optimizer.zero_grad()
                yield losses

    def state_dict(self):
        """As in Detectron2, with counts of skips. `grad_scaler` is never empty."""
        state = SimpleTrainer.state_dict(self)
        state["grad_scaler"] = scaler_state.to_save(self.grad_scaler, self.policy.scaler, self._unused_scaler_state)
        if self._skips is not None:
            state["skips"] = {name: getattr(self._skips, name) for name in ("skips", "skips_in_row", "retries")}
        return state

    def load_state_dict(self, state_dict):
        """Takes the state of any Detectron2 trainer, with or without AMP, in any precision.

        The scale and its growth counter come from the state, the scaler's settings from the policy.
        """
        SimpleTrainer.load_state_dict(self, state_dict)
        if "skips" in state_dict:
            counts = state_dict["skips"]
            self._skips = StepRecord(self.iter, counts["skips_in_row"] > 0, None, **counts, losses={})
        saved = state_dict.get("grad_scaler")
        self._unused_scaler_state = scaler_state.load(self.grad_scaler, self.policy.scaler, saved)


def _policy_from(policy, precision, grad_scaler):
    if policy is not None:
        if precision is not None or grad_scaler is not None:
            raise UserError(
                f"AMPTrainer got policy={policy!r} together with precision={precision!r} and grad_scaler="
                f"{grad_scaler!r}. Pass the policy alone; its ScalerOptions say how gradients are scaled."
            )
        if policy.precision == "off":
            raise UserError("AMPTrainer got a policy that is off. Use Detectron2's SimpleTrainer.")
        return policy
    if grad_scaler is None:
        return PrecisionPolicy("auto" if precision is None else precision)
    policy = PrecisionPolicy("fp16" if precision is None else precision)
    if policy.precision != "fp16" and grad_scaler.is_enabled():
        raise UserError(
            f"AMPTrainer got precision={precision!r} with an enabled grad_scaler. Only fp16 needs gradient scaling: "
            "leave grad_scaler out, or pass precision=torch.float16."
        )
    return policy


def _device_of(model):
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
