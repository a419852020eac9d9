"""TrainingModule: a Detectron2 config as a LightningModule."""

import contextlib
import logging
from functools import partial

import torch
from detectron2.engine.hooks import PeriodicWriter
from detectron2.evaluation import print_csv_format
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from lightning.pytorch import LightningModule

from .. import _compat
from ..default_trainer import PrecisionTrainer
from ..errors import UserError
from ..evaluation import evaluating
from ..hooks import finite
from ..launch import ensure_local_group
from ..policy import PrecisionPolicy
from ..step import add_up, by_name, describe_step
from .checkpoint import LightningCheckpointer
from .data import DataModule, Stream, for_this_run
from .loop import EndOfRun, LoggerWriter, hook_loop
from .precision import PolicyPrecision

logger = logging.getLogger(__name__)
_STATE = "detectron2"  # where a checkpoint of Lightning keeps the state of our loop


class TrainingModule(LightningModule):
    """A config, trained by Lightning as PrecisionTrainer trains it: the same losses, hooks, writers and evaluation.

    Use it with `Trainer(**trainer_options(cfg))` and a DataModule. Evaluation is done by Detectron2's hook, every
    TEST.EVAL_PERIOD updates and at the end; `Trainer.validate` evaluates, too.

    Attributes:
        cfg (CfgNode): as given; scaled to the number of ranks when the run starts.
        parts (type): the DefaultTrainer whose `build_*` methods make the parts of the run and whose `test` evaluates.
        model (nn.Module or None): Detectron2's; made when the run starts.
        loop (DefaultTrainer or None): what hooks take for their trainer; made when training starts.
        last_results (dict): of the last evaluation.
        window (list): the (batch, batch_idx) pairs of the update under way.
    """

    allow_zero_length_dataloader_with_multiple_devices = True  # fewer test images than ranks
    is_protected_by_its_loop = True  # the operators and modules that stay in fp32

    def __init__(self, cfg, parts=PrecisionTrainer, *, trust=False):
        """
        Args:
            cfg (CfgNode): with the keys of `add_amp_config`.
            parts (type): a subclass of DefaultTrainer.
            trust (bool): whether MODEL.WEIGHTS may hold pickled objects of any kind.
        """
        super().__init__()
        self.given = self.cfg = cfg
        self.parts = parts
        self.trust = trust
        self.model = None
        self.loop = None
        self._optimizer = self._scheduler = None
        self._more_hooks = []
        self._resumed = None
        self._weights_loaded = False
        self._losses = {}
        self.window = []
        self._evaluators = []
        self._results = {}

    @property
    def last_results(self):
        return self.loop.last_results if self.loop is not None else self._results

    @property
    def last_step(self):
        """The StepRecord of the update just tried; None without a policy."""
        return getattr(self.precision_plugin, "last_step", None)

    @property
    def precision_plugin(self):
        """The PolicyPrecision of the Trainer, or None when Lightning's own precision trains."""
        plugin = self.trainer.precision_plugin
        return plugin if isinstance(plugin, PolicyPrecision) else None

    def register_hooks(self, hooks):
        """Adds hooks of Detectron2, after those that `parts` builds.

        Args:
            hooks (list[HookBase]):
        """
        self._more_hooks.extend(hooks)

    # Building. Lightning calls these, in this order.

    def setup(self, stage):
        if not logging.getLogger("d2amp_ext").isEnabledFor(logging.INFO):
            setup_logger(distributed_rank=comm.get_rank(), name="d2amp_ext")
        ensure_local_group(getattr(self.trainer.strategy, "num_processes", 1))
        data = self.trainer.datamodule
        shares_cfg = isinstance(data, DataModule) and data.given is self.given
        self.cfg = data.cfg if shares_cfg else for_this_run(self.given)
        if self.cfg.SOLVER.AMP.ENABLED and stage == "fit" and self.precision_plugin is None:
            raise UserError(
                f"SOLVER.AMP.ENABLED is True, but this Trainer's precision is {self.trainer.precision}. Make it with "
                "Trainer(**d2amp_ext.lightning.trainer_options(cfg)), or set SOLVER.AMP.ENABLED False."
            )

    def configure_model(self):
        if self.model is None:
            self.model = self.parts.build_model(self.cfg)

    def configure_optimizers(self):
        self._optimizer = self.parts.build_optimizer(self.cfg, self.model)
        self._scheduler = self.parts.build_lr_scheduler(self.cfg, self._optimizer)
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": self._scheduler, "interval": "step"}}

    def configure_callbacks(self):
        return [] if any(isinstance(callback, EndOfRun) for callback in self.trainer.callbacks) else [EndOfRun()]

    def lr_scheduler_step(self, scheduler, metric):
        """Detectron2's hook steps the schedule of `configure_optimizers`, and waits on skips when it is told to."""
        if scheduler is not self._scheduler:
            super().lr_scheduler_step(scheduler, metric)

    def _checkpointer(self):
        checkpointer = LightningCheckpointer(self.model, self.cfg.OUTPUT_DIR, partial(self.trainer.save_checkpoint, weights_only=False))
        checkpointer.trust = self.trust
        return checkpointer

    def _load_weights(self):
        if self._resumed is None and not self._weights_loaded:
            self._checkpointer().load(self.cfg.MODEL.WEIGHTS, checkpointables=[])
        self._weights_loaded = True

    # Training

    def on_fit_start(self):
        self._load_weights()

    def on_train_start(self):
        stream = self.trainer.train_dataloader
        ours = isinstance(stream, Stream)
        loader = stream.loader if ours else ()
        self.loop = hook_loop(
            self.parts, self.cfg, self.model, loader, self.trainer.optimizers[0], self._scheduler,
            self._checkpointer(), self.precision_plugin,
        )  # fmt: skip
        self.loop.register_hooks(self._more_hooks)
        if self.trainer.loggers and comm.is_main_process():
            self.loop.register_hooks([PeriodicWriter([LoggerWriter(self.trainer.loggers)], period=20)])
        if self._resumed is not None:
            self.loop.load_state_dict(self._resumed)
            self.loop.start_iter = self.loop.iter + 1
        self._steps_before = self.trainer.global_step - self.loop.start_iter
        if self.precision_plugin is not None:
            self.precision_plugin.context = lambda: describe_step(self.loop.optimizer, [batch for batch, _ in self.window])
        self.loop.begin()
        if ours:
            inner = self.loop.inner
            stream.take = lambda: next(inner._data_loader_iter)
            stream.before_batch = self.loop.begin_step
        self._seconds = (lambda: stream.seconds) if ours else (lambda: 0.0)
        self._seconds_before = self._seconds()

    def on_train_batch_start(self, batch, batch_idx):
        self.loop.begin_step()
        self.window.append((batch, batch_idx))

    def training_step(self, batch, batch_idx):
        """The sum of the losses of a micro-batch, an fp32 scalar."""
        precision = self.precision_plugin
        if precision is None:
            self._losses = by_name(self.model(batch))
            return add_up(self._losses)
        if precision.gave_up:
            return torch.zeros((), device=self.device)
        try:
            losses = by_name(self.model(batch))
        except FloatingPointError as error:
            precision.give_up(error)
            return torch.zeros((), device=self.device)
        precision.name_losses(losses)
        return add_up(losses)

    def on_before_optimizer_step(self, optimizer):
        self.loop.inner.after_backward()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step - self._steps_before <= self.loop.iter:
            return  # the window goes on
        seconds = self._seconds()
        losses = {name: value.detach() for name, value in self._losses.items()}
        self.loop.end_step(self.last_step, losses, seconds - self._seconds_before)
        self._seconds_before = seconds
        self.window, self._losses = [], {}
        self._tell_lightning()

    def _tell_lightning(self):
        """Gives Lightning's progress bar and callbacks the figures; its loggers have them from a writer."""
        storage, now = self.loop.storage, self.loop.iter - 1
        latest = {name: value for name, (value, iteration) in storage.latest().items() if iteration == now}
        if "total_loss" in latest:
            self.log("total_loss", latest.pop("total_loss"), prog_bar=True, logger=False, batch_size=1)
        for name, value in latest.items():
            self.log(name, value, logger=False, batch_size=1)

    def on_train_end(self):
        self.loop.end()

    # Evaluation by Trainer.validate

    def on_validation_start(self):
        if self.trainer.state.fn == "validate":
            self._load_weights()
        self._evaluation = contextlib.ExitStack()
        policy = PrecisionPolicy.for_evaluation(self.cfg)
        self._evaluated = self._evaluation.enter_context(evaluating(self.model, policy))

    def on_validation_end(self):
        self._evaluation.close()

    def on_validation_epoch_start(self):
        self._evaluators = [self.parts.build_evaluator(self.cfg, name) for name in self.cfg.DATASETS.TEST]
        for evaluator in self._evaluators:
            evaluator.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluators[dataloader_idx].process(batch, self._evaluated(batch))

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        results = {}
        for name, evaluator in zip(self.cfg.DATASETS.TEST, self._evaluators):
            results[name] = evaluator.evaluate() or {}
            if comm.is_main_process():
                logger.info(f"Evaluation results for {name} in csv format:")
                print_csv_format(results[name])
        self._results = results = next(iter(results.values())) if len(results) == 1 else results
        for name, value in flatten_results_dict(finite(results)).items():
            self.log(name, float(value), batch_size=1, rank_zero_only=True)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint):
        if self.loop is not None:
            checkpoint[_STATE] = self.loop.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self._resumed = checkpoint.get(_STATE)
        if self._resumed is not None and _compat.repeats_last_batch():
            for counts in checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].values():
                if isinstance(counts, dict):
                    counts["completed"] = counts["processed"]
