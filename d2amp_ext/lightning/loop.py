"""What Detectron2's hooks take for their trainer while Lightning makes the steps."""

import logging
import weakref

from detectron2.engine import DefaultTrainer, SimpleTrainer
from detectron2.engine.hooks import LRScheduler
from detectron2.utils.events import EventStorage, EventWriter, get_event_storage

from lightning.pytorch.callbacks import Callback

from ..default_trainer import PrecisionTrainerMixin
from ..errors import UserError
from ..trainer import AMPTrainer

logger = logging.getLogger(__name__)


class _HookLoop:
    """In front of a DefaultTrainer: its hooks, writers, evaluation and state, without its loop.

    Attributes:
        last_results (dict): of the last evaluation.
    """

    def __init__(self, cfg, model, data_loader, optimizer, scheduler, checkpointer, precision):
        """
        Args:
            cfg (CfgNode):
            model (nn.Module): Detectron2's, on its device.
            data_loader (iterable): Detectron2's, not iterated yet.
            optimizer (torch.optim.Optimizer):
            scheduler (LRScheduler or None): that Detectron2's hook steps.
            checkpointer (PrecisionCheckpointer): gets the state of the loop to save.
            precision (PolicyPrecision or None): that makes the steps. None: Lightning's own precision, with AMP off.

        Raises:
            UserError: for an inner trainer that has its own way of making a step.
        """
        super(DefaultTrainer, self).__init__()
        self._precision = precision
        self._trainer = SimpleTrainer(model, data_loader, optimizer)  # the mixin makes it ours when AMP is on
        self.scheduler = scheduler
        self.checkpointer = checkpointer
        checkpointer.add_checkpointable("trainer", weakref.proxy(self))
        self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
        self.in_step = self.running = False
        if precision is not None:
            if type(self.inner) is not AMPTrainer:
                raise UserError(
                    f"SOLVER.AMP.TRAINER = {cfg.SOLVER.AMP.TRAINER!r}: with Lightning, which makes the steps, it must "
                    "be 'AMPTrainer'. Subclass TrainingModule instead, or use d2amp train."
                )
            self.inner.grad_scaler = precision.scaler
        self.register_hooks(self.build_hooks())

    def _resolve_policy(self, cfg, device):
        return super()._resolve_policy(cfg, device) if self._precision is None else self._precision.policy

    def build_hooks(self):
        built = super().build_hooks()
        if self.scheduler is None:  # whoever built the optimizer has a schedule of their own, which Lightning steps
            built = [hook for hook in built if not isinstance(hook, LRScheduler)]
        return built

    @property
    def inner(self):
        """The trainer that keeps the records of steps."""
        return self._trainer

    @property
    def last_results(self):
        return getattr(self, "_last_eval_results", {})

    def begin(self):
        """Everything before the first step."""
        logger.info(f"Starting training from iteration {self.start_iter}")
        self.iter = self.start_iter
        self.storage = EventStorage(self.start_iter)
        self.storage.__enter__()
        self.running = True
        self.before_train()

    def begin_step(self):
        """Called before a batch is taken; once a step, however often it is called."""
        if not self.in_step:
            self.in_step = True
            self.inner.iter = self.iter
            self.before_step()

    def end_step(self, record, losses, data_time):
        """After an update or a skip.

        Args:
            record (StepRecord or None): None without a policy.
            losses (dict[str, Tensor]): of the last micro-batch.
            data_time (float): seconds.
        """
        if record is None:
            self.inner._write_metrics(losses, data_time)
        else:
            self.inner.keep(record, data_time)
        self.after_step()
        self.iter += 1
        self.in_step = False

    def end(self):
        """Everything after the last step, also of a run that ends by an error. Only the first call counts."""
        if not self.running:
            return
        self.running = False
        try:
            self.after_train()
        finally:
            self.storage.__exit__(None, None, None)


def hook_loop(parts, *args):
    """A loop with the hooks, writers and evaluation of `parts`, a subclass of DefaultTrainer."""
    bases = (parts,) if issubclass(parts, PrecisionTrainerMixin) else (PrecisionTrainerMixin, parts)
    return type("LightningLoop", (_HookLoop, *bases), {})(*args)


class EndOfRun(Callback):
    """Ends the loop of a run that stops by an error, so that what it has is written."""

    def on_exception(self, trainer, pl_module, exception):
        if pl_module.loop is not None:
            pl_module.loop.end()


class LoggerWriter(EventWriter):
    """Hands the scalars of an EventStorage to Lightning's loggers, each once and under its own iteration."""

    def __init__(self, loggers):
        """
        Args:
            loggers (list[Logger]):
        """
        self._loggers = loggers
        self._written = -1

    def write(self):
        by_iteration = {}
        for name, (value, iteration) in get_event_storage().latest_with_smoothing_hint(20).items():
            if iteration > self._written:
                by_iteration.setdefault(iteration, {})[name] = value
        for iteration, scalars in sorted(by_iteration.items()):
            for log in self._loggers:
                log.log_metrics(scalars, step=iteration)
            self._written = iteration
