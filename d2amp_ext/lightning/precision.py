"""A precision plugin of Lightning that holds a PrecisionPolicy: autocast, scaling, and the guard of every step."""

import contextlib
from functools import partial

import torch
from lightning.pytorch.plugins.precision import Precision

from .. import scaler_state
from ..errors import UserError
from ..guard import NonFiniteError, StepRecord, worst_over_ranks
from ..numerics.protect import protect
from ..numerics.statistics import RunningStatistics
from ..precisions import key_names
from ..step import conclude, describe_step
from .names import SHOWN
from .retry import Retry
from .window import Window


class PolicyPrecision(Precision):
    """`Trainer(plugins=[PolicyPrecision(policy)])` trains any LightningModule in the precision of a policy.

    As in our other trainers, a step whose losses or gradients are not finite is skipped by all ranks, clipping acts on
    true gradients, and the run gives up when the policy says so. Hooks named on_before_optimizer_step see unscaled
    gradients. On several ranks, a module whose forward may raise FloatingPointError on one of them catches it, calls
    `give_up` and returns any tensor.

    Attributes:
        policy (PrecisionPolicy): of training; resolved for the Trainer's device when the run starts.
        evaluation (PrecisionPolicy or None): of validation and test; None means as in training.
        scaler (torch.amp.GradScaler or None): made when the run starts.
        last_step (StepRecord or None): the update just tried.
        context (str or callable): added to the message that ends a run.
    """

    def __init__(self, policy, evaluation=None):
        """
        Args:
            policy (PrecisionPolicy): need not be resolved.
            evaluation (PrecisionPolicy or None):

        Raises:
            UserError: for a policy that is off.
        """
        super().__init__()
        if policy.precision == "off":
            raise UserError("PolicyPrecision got a policy that is off. Leave it out: then Lightning trains in fp32.")
        self.policy = policy
        self.evaluation = evaluation
        self.scaler = None
        self.last_step = None
        self.context = None
        self._device = self._statistics = self._retry = None
        self._skips = None  # the StepRecord that counts go on from; survives a resume
        self._unused_scaler_state = None
        self._window = Window()
        self._clip = None
        self._switches = None

    @property
    def precision(self):
        """Lightning's name of the precision."""
        return SHOWN[self.policy.precision]

    # Setting up

    def convert_module(self, module):
        """Resolves the policy, and keeps in fp32 what it says, such as operators that are wrong in 16 bit."""
        self._device = module.device
        if self.evaluation is None or module.trainer.state.fn == "fit":
            self.policy = self.policy.resolve(self._device, "Precision of training")
            self.scaler = self.scaler or self.policy.make_scaler()
            self._statistics = RunningStatistics(module)
            self._retry = self._make_retry(module)
            if not getattr(module, "is_protected_by_its_loop", False):
                protect(module, self.policy)
        return module

    def _make_retry(self, module):
        if self.policy.nonfinite != "retry_fp32":
            return None
        if not hasattr(module, "window") or not module.automatic_optimization:
            raise UserError(
                f"{key_names('nonfinite')} = 'retry_fp32' makes the forward passes of an update a second time: "
                f"{type(module).__name__} must keep the (batch, batch_idx) pairs of it in a list named `window`, as "
                "TrainingModule does. Or choose skip or raise."
            )
        return Retry(self.policy)

    def connect(self, model, optimizers, lr_schedulers):
        """Turns the TF32 switches as the policy says, until the end of the training."""
        self.teardown()
        if optimizers:
            self._switches = contextlib.ExitStack()
            self._switches.enter_context(self.policy.float32_switches())
        return model, optimizers, lr_schedulers

    def teardown(self):
        if self._switches is not None:
            self._switches.close()
            self._switches = None

    # Forward passes

    @contextlib.contextmanager
    def forward_context(self):
        """Lightning's own context turns the cache of autocast off, and with it losses differ from other loops."""
        again = self._retry is not None and self._retry.running
        with (self._retry.policy if again else self.policy).autocast():
            yield

    @contextlib.contextmanager
    def train_step_context(self):
        self._open_window()
        if self._window.is_new and not (self._retry and self._retry.running):
            self._statistics.save()
            if self._retry:
                self._retry.remember()
        try:
            with self.forward_context():
                yield
        except FloatingPointError as error:
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise  # Lightning takes no None from one of several ranks
            self.give_up(error)
            self._window.cause = "forward"

    @contextlib.contextmanager
    def val_step_context(self):
        if self.evaluation is None:
            with self.forward_context():
                yield
            return
        if self.evaluation.precision != "off":
            self.evaluation = self.evaluation.resolve(self._device, "Precision of evaluation")
        with self.evaluation.float32_switches(), self.evaluation.autocast():
            yield

    test_step_context = predict_step_context = val_step_context

    # Steps

    @property
    def gave_up(self):
        """Whether this window ends in a skip already."""
        return self._window.cause is not None and not self._window.concluded

    def give_up(self, failure):
        """Says that the forward of this rank met values that are not finite. All ranks then skip the update together.

        Args:
            failure (FloatingPointError):
        """
        self._window.failure = failure

    def name_losses(self, losses):
        """Names the parts of the loss that `training_step` is about to return, for the StepRecord.

        Args:
            losses (dict[str, Tensor]): scalars.
        """
        self._window.named = {name: value.detach() for name, value in losses.items()}

    def _open_window(self):
        if self._window.concluded:
            self._window = Window()

    def pre_backward(self, tensor, module):
        """Agrees with the other ranks whether there is a backward, and scales the loss."""
        self._open_window()  # of a module that steps several times in one training_step
        window = self._window
        if window.cause is None:
            obstacle = "forward" if window.failure is not None else None if tensor.requires_grad else "no_gradient"
            window.cause = worst_over_ranks(obstacle)
            if window.cause == "forward" and window.failure is None:
                window.failure = "on another rank"
        if window.cause is None:
            steps = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
            window.add(tensor.detach(), steps)
            if not (self._retry and self._retry.running):
                tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def backward(self, tensor, model, optimizer, *args, **kwargs):
        if self._window.cause is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        """Runs the window's last forward and backward, then updates or skips on all ranks alike."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError("LBFGS evaluates a step several times, which our policy cannot guard. Choose another optimizer.")
        result = closure()
        window = self._window
        window.concluded = True
        total = torch.zeros((), device=self._device) if window.total is None else window.total
        try:
            self.last_step = conclude(
                total,
                window.losses,
                optimizer,
                policy=self.policy,
                scaler=self.scaler,
                iteration=0 if self._skips is None else self._skips.iteration + 1,
                previous=self._skips,
                cause=window.cause,
                failure=window.failure,
                after_backward=partial(self._after_closure, model, optimizer),
                context=self.context or (lambda: describe_step(optimizer, ())),
                step=partial(self._clip_and_step, optimizer, kwargs),
                retry=self._retry and partial(self._again, model, optimizer),
            )
        except NonFiniteError as error:
            self._statistics.restore()
            self.last_step = self._skips = error.record
            raise
        if self.last_step.skipped:
            self._statistics.restore()
        self._skips = self.last_step
        return result

    def _again(self, model, optimizer):
        """The window in fp32: its losses, their sum, and the cause of a skip with what was raised."""
        self._statistics.restore()
        self._window = window = Window()
        self._retry.run(model, optimizer)
        window.concluded = True
        return window.losses, window.total, window.cause, window.failure

    def _clip_gradients(self, model, optimizer, clip_val=None, gradient_clip_algorithm=None):
        """Put off until it is known that the step is made: the record has the norm before clipping."""
        self._clip = partial(super()._clip_gradients, model, optimizer, clip_val, gradient_clip_algorithm)

    def _clip_and_step(self, optimizer, kwargs):
        clip, self._clip = self._clip, None
        if clip is not None:
            clip()
        optimizer.step(**kwargs)

    # Checkpoints

    def state_dict(self):
        """The scaler, and the counts of steps and skips: plain types."""
        counts = self._skips or StepRecord(-1, False, None, 0, 0, {})
        return {
            "grad_scaler": scaler_state.to_save(self.scaler, self.policy.scaler, self._unused_scaler_state),
            "iteration": counts.iteration,
            "skips": counts.skips,
            "skips_in_row": counts.skips_in_row,
        }

    def load_state_dict(self, state_dict):
        """Takes the state of a run in any precision."""
        self._unused_scaler_state = scaler_state.load(self.scaler, self.policy.scaler, state_dict.get("grad_scaler"))
        skips_in_row = state_dict.get("skips_in_row", 0)
        self._skips = StepRecord(
            state_dict["iteration"], skips_in_row > 0, None, state_dict.get("skips", 0), skips_in_row, {}
        )

    def on_load_checkpoint(self, checkpoint):
        """Takes the scale from a checkpoint that was written with Lightning's own plugin."""
        if type(self).__qualname__ not in checkpoint and self.scaler is not None:
            scaler = checkpoint.get("MixedPrecision") or None
            self.load_state_dict({"grad_scaler": scaler, "iteration": checkpoint.get("global_step", 0) - 1})
