"""PrecisionTrainer: DefaultTrainer with a precision policy. The composition root of YAML runs."""

import contextlib
import logging
import os
import threading
import types
import warnings
import weakref
from collections import OrderedDict

import torch
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer, SimpleTrainer, defaults
from detectron2.engine import hooks as stock_hooks
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from . import _compat, hooks
from .build import build_inner_trainer, wrap_model, write_bundles
from .checkpoint import PrecisionCheckpointer
from .config import check_cfg, unused_amp_keys
from .data.register import register_datasets
from .evaluation import AutocastModel, build_evaluator, evaluating
from .monitor import build_monitor_hooks, place, writers_of
from .optimizer import build_optimizer
from .policy import PrecisionPolicy
from .resume import ResumeState
from .scaling import scale_to_world
from .trainer import AMPTrainer

logger = logging.getLogger(__name__)
_one_at_a_time = threading.RLock()  # a trainer may make another one, such as a teacher


class PrecisionTrainerMixin:
    """For any subclass of DefaultTrainer: `class Trainer(PrecisionTrainerMixin, TheirTrainer)`.

    With SOLVER.AMP.ENABLED the inner trainer is the one that SOLVER.AMP.TRAINER names; without it, Detectron2's own
    SimpleTrainer. `build_*`, `test`, `run_step` and constructors of the other class keep working.

    Attributes:
        policy (PrecisionPolicy): of training, resolved.
        last_step (StepRecord or None): the step just made; None when AMP is off.
    """

    def __init__(self, cfg):
        with self._constructing(cfg) as cfg:
            super().__init__(cfg)

    @contextlib.contextmanager
    def _constructing(self, cfg):
        """Around the constructor of DefaultTrainer. Gives the cfg to pass to it."""
        if not logging.getLogger("d2amp_ext").isEnabledFor(logging.INFO):
            setup_logger(name="d2amp_ext")
        check_cfg(cfg)
        register_datasets(cfg)
        unused = unused_amp_keys(cfg)
        if unused:
            logger.warning(f"SOLVER.AMP.ENABLED is False: {', '.join(unused)} have no effect.")
        cfg = scale_to_world(cfg, comm.get_world_size())
        self._early_cfg = cfg  # DefaultTrainer sets self.cfg only after the inner trainer
        with _ddp_of(cfg):
            yield cfg

    # The inner trainer and the checkpointer are made inline by DefaultTrainer. Exact stock types become ours; what a
    # subclass made on purpose stays. A constructor that never reaches ours sets self.cfg last: hence at first use.

    @property
    def _trainer(self):
        cfg = self.__dict__.get("cfg") or self.__dict__.get("_early_cfg")
        if "_as_set" in self.__dict__ and cfg is not None:
            self.__dict__["_inner"] = self._converted(self.__dict__.pop("_as_set"), cfg)
        if not {"_as_set", "_inner"} & self.__dict__.keys():
            raise AttributeError("_trainer is not made yet")
        return self.__dict__.get("_as_set") or self.__dict__["_inner"]

    @_trainer.setter
    def _trainer(self, trainer):
        self.__dict__["_as_set"] = trainer

    @property
    def checkpointer(self):
        if "checkpointer" not in self.__dict__:
            raise AttributeError("checkpointer is not made yet")
        return self.__dict__["checkpointer"]

    @checkpointer.setter
    def checkpointer(self, checkpointer):
        if type(checkpointer) is DetectionCheckpointer:
            checkpointer.__class__ = PrecisionCheckpointer
        self.__dict__["checkpointer"] = checkpointer

    def _converted(self, trainer, cfg):
        ours = isinstance(trainer, AMPTrainer)
        if ours:
            self._policy = trainer.policy
        else:
            device = next(trainer.model.parameters(), torch.zeros(())).device
            self._policy = self._resolve_policy(cfg, device)
        if cfg.SOLVER.AMP.ENABLED and type(trainer) in (SimpleTrainer, StockAMPTrainer):
            trainer = build_inner_trainer(cfg, self._policy, trainer.model, trainer.data_loader, trainer.optimizer)
            ours = True
        elif cfg.SOLVER.AMP.ENABLED and not ours:
            logger.warning(f"The inner trainer is a {type(trainer).__name__} of this project, left as it is.")
        if ours:
            trainer.register_hooks([hooks.AfterBackward(weakref.proxy(self))])
            write_bundles(cfg, trainer, cfg.dump(), "yaml")
        self._resume_state = ResumeState(weakref.proxy(self), trainer.data_loader)
        return trainer

    def _resolve_policy(self, cfg, device):
        return PrecisionPolicy.from_cfg(cfg).resolve(device, "Precision of training")

    @property
    def policy(self):
        self._trainer  # decides it
        return self._policy

    @property
    def last_step(self):
        return getattr(self._trainer, "last_step", None)

    # Building

    @classmethod
    def build_optimizer(cls, cfg, model):
        """As SOLVER.OPTIMIZER says, unless the class that this is mixed into builds its own."""
        theirs = super().build_optimizer
        if theirs.__func__ is not DefaultTrainer.build_optimizer.__func__:
            return theirs(cfg, model)
        return build_optimizer(cfg, model, stock=theirs)

    def build_hooks(self):
        """The hooks of the class that this is mixed into, with Detectron2's own exchanged for those of `hooks`."""
        self._trainer  # makes the resume state
        others = None if comm.is_main_process() else (self.checkpointer, self.cfg.SOLVER.CHECKPOINT_PERIOD)
        hold_lr_on_skip = self.cfg.SOLVER.AMP.HOLD_LR_ON_SKIP
        built = hooks.exchange(super().build_hooks(), self._resume_state, hold_lr_on_skip, on_other_ranks=others)
        for hook in built:
            if type(hook) is stock_hooks.PreciseBN and not hook._disabled:
                hook._model = AutocastModel(hook._model, self.policy)
        inner = self._trainer
        watching = build_monitor_hooks(self.cfg, self.policy, self.model, inner.optimizer, writers=writers_of(built))
        if self.policy.precision == "off":  # other hooks are not told, as in Detectron2
            inner.register_hooks([hooks.AfterBackward(types.SimpleNamespace(_hooks=watching))])
        return place(watching, built)

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        """As in Detectron2, in the precision of TEST.AMP and with fp32 outputs."""
        with evaluating(model, PrecisionPolicy.for_evaluation(cfg)) as model:
            return super().test(cfg, model, evaluators)

    # Running

    def train(self):
        if self.start_iter >= self.max_iter:
            logger.warning(
                f"Nothing to train: {self.start_iter} updates are done and SOLVER.MAX_ITER is {self.max_iter}. "
                "Set SOLVER.MAX_ITER higher to go on."
            )
        with self.policy.float32_switches():
            return super().train()

    def before_train(self):
        inner = self._trainer
        inner.max_iter = self.max_iter
        if hasattr(inner, "get_ready"):
            inner.get_ready(self._hooks)
        super().before_train()
        hooks.restore(self, self._resume_state, inner)

    def after_train(self):
        if hasattr(self._trainer, "flush_metrics"):
            self._trainer.flush_metrics(gather=self.iter == self.max_iter)
        super().after_train()

    # Resuming

    def state_dict(self):
        """As in Detectron2, with the random states and data positions of the ranks."""
        state = super().state_dict()
        if not _compat.saves_inner_trainer():
            state["_trainer"] = self._trainer.state_dict()
        return {**state, **self._resume_state.state_dict()}

    def load_state_dict(self, state_dict):
        """Takes the state of any DefaultTrainer, also one from before inner trainers saved theirs."""
        if "_trainer" not in state_dict:
            logger.warning("The checkpoint has no optimizer state; the optimizer starts afresh.")
            state_dict = {**state_dict, "_trainer": self._trainer.state_dict()}
        if not self.cfg.SOLVER.AMP.ENABLED and state_dict["_trainer"].get("grad_scaler"):
            logger.info("The checkpoint has gradient scaler state, which a run without AMP does not use.")
        super().load_state_dict(state_dict)
        if not _compat.saves_inner_trainer():
            self._trainer.load_state_dict(state_dict["_trainer"])
        self._resume_state.load_state_dict(state_dict)


class PrecisionTrainer(PrecisionTrainerMixin, DefaultTrainer):
    """DefaultTrainer with a precision policy and an evaluator for every data set type of Detectron2.

    The cfg must have our keys: `d2amp_ext.load_cfg`, or `add_amp_config` on one of your own.
    """

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        return build_evaluator(cfg, dataset_name, output_folder)

    @classmethod
    def test_with_tta(cls, cfg, model):
        """Evaluates with test-time augmentation, in the precision of TEST.AMP. Result names end in "_TTA"."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((f"{name}_TTA", value) for name, value in results.items())


@contextlib.contextmanager
def _ddp_of(cfg):
    """While DefaultTrainer's constructor runs: DDP with the arguments of SOLVER.DDP, on CPUs too, and no warnings of
    torch about the CUDA scaler that it makes and that is thrown away.

    The constructor wraps the model inline, so the name that it looks up is exchanged for as long as it runs.
    """
    stock = defaults.create_ddp_model

    def create_ddp_model(model, **kwargs):
        return wrap_model(model, **{**kwargs, **{name.lower(): value for name, value in cfg.SOLVER.DDP.items()}})

    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.cuda\.amp\.GradScaler")
        defaults.create_ddp_model = create_ddp_model
        try:
            yield
        finally:
            defaults.create_ddp_model = stock
