"""PrecisionTrainer: DefaultTrainer with a precision policy. The composition root of YAML runs."""

import contextlib
import logging
import math
import threading
import warnings
import weakref

import torch
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer, SimpleTrainer, defaults
from detectron2.engine import hooks as stock_hooks
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from . import _compat, hooks, random_state
from .checkpoint import PrecisionCheckpointer
from .config import check_cfg, unused_amp_keys
from .data.position import DataPosition
from .data.register import register_datasets
from .errors import UserError
from .evaluation import AutocastModel, build_evaluator, in_precision
from .optimizer import build_optimizer
from .policy import PrecisionPolicy
from .scaling import scale_to_world
from .trainer import TRAINER_REGISTRY

logger = logging.getLogger(__name__)
_constructing = threading.RLock()  # a trainer may make another one, such as a teacher


class PrecisionTrainerMixin:
    """For any subclass of DefaultTrainer: `class Trainer(PrecisionTrainerMixin, TheirTrainer)`.

    With SOLVER.AMP.ENABLED the inner trainer is the one that SOLVER.AMP.TRAINER names; without it, Detectron2's own
    SimpleTrainer. `build_*`, `test`, `run_step` and constructors of the other class keep working.

    Attributes:
        policy (PrecisionPolicy): of training, resolved.
        last_step (StepRecord or None): the step just made; None when AMP is off.
    """

    evaluated_iter = -1

    def __init__(self, cfg):
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
            super().__init__(cfg)

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
        device = next(trainer.model.parameters(), torch.zeros(())).device
        policy = self._policy = PrecisionPolicy.from_cfg(cfg).resolve(device, "Precision of training")
        if cfg.SOLVER.AMP.ENABLED and type(trainer) in (SimpleTrainer, StockAMPTrainer):
            trainer = _from_registry(cfg.SOLVER.AMP.TRAINER)(
                trainer.model,
                trainer.data_loader,
                trainer.optimizer,
                policy=policy,
                accumulate_steps=cfg.SOLVER.ACCUMULATE_STEPS,
                gather_metric_period=cfg.MONITOR.PERIOD or 20,
                log_grad_scaler=cfg.SOLVER.AMP.LOG_GRAD_SCALER,
            )
            trainer.register_hooks([hooks.AfterBackward(weakref.proxy(self))])
            batch = cfg.SOLVER.IMS_PER_BATCH
            logger.info(
                f"An update sees {batch * cfg.SOLVER.ACCUMULATE_STEPS} images: {cfg.SOLVER.ACCUMULATE_STEPS} "
                f"micro-batch(es) of {batch} over {comm.get_world_size()} rank(s)."
            )
        elif cfg.SOLVER.AMP.ENABLED:
            logger.warning(f"The inner trainer is a {type(trainer).__name__} of this project, left as it is.")
        self._data_position = DataPosition(trainer.data_loader)
        return trainer

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
        built = []
        for hook in super().build_hooks():
            if type(hook) is stock_hooks.LRScheduler:
                hook = hooks.LRScheduler(hook._optimizer, hook._scheduler, self.cfg.SOLVER.AMP.HOLD_LR_ON_SKIP)
            elif type(hook) is stock_hooks.PeriodicCheckpointer:
                hook.__class__ = hooks.PeriodicCheckpointer
            elif type(hook) is stock_hooks.EvalHook:
                hook.__class__ = hooks.EvalHook
                if not comm.is_main_process():
                    built.append(hooks.PeriodicCheckpointer(self.checkpointer, self.cfg.SOLVER.CHECKPOINT_PERIOD))
            elif type(hook) is stock_hooks.PreciseBN and not hook._disabled:
                hook._model = AutocastModel(hook._model, self.policy)
            built.append(hook)
        return built

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        """As in Detectron2, in the precision of TEST.AMP and with fp32 outputs."""
        policy = PrecisionPolicy.for_evaluation(cfg)
        model = in_precision(model, policy)
        with getattr(model, "policy", policy).float32_switches():
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
        periods = [h._period for h in self._hooks if isinstance(h, stock_hooks.PeriodicWriter)]
        if hasattr(inner, "flush_metrics"):
            # Only the main rank has writers; all ranks must flush at the same iterations, and before a writer writes.
            periods = [period for rank in comm.all_gather(periods) for period in rank]
            inner.gather_metric_period = math.gcd(inner.gather_metric_period, *periods)
        super().before_train()
        self._restore_rank_state()

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
        iteration, states = self.__dict__.get("_gathered") or (None, None)
        state["ranks"] = states if iteration == self.iter else [self._rank_state()]
        state["evaluated_iter"] = self.evaluated_iter
        return state

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
        self.evaluated_iter = state_dict.get("evaluated_iter", state_dict["iteration"])
        self._resumed_ranks = state_dict.get("ranks", [])

    def gather_rank_states(self):
        """Collects what every rank adds to the next checkpoint of this iteration. Called on every rank."""
        self._gathered = (self.iter, comm.gather(self._rank_state()))

    def _rank_state(self):
        return {"random": random_state.capture(), "data": self._data_position.state_dict()}

    def _restore_rank_state(self):
        """Continues random numbers and data where the checkpoint was written; before the first step of a resumed run."""
        if "_resumed_ranks" not in self.__dict__:
            return
        states = self.__dict__.pop("_resumed_ranks")
        if len(states) != comm.get_world_size():
            logger.warning(
                f"The checkpoint has the random states of {len(states)} rank(s), this run has {comm.get_world_size()}: "
                "random numbers and the order of data start again."
            )
            return
        state = states[comm.get_rank()]
        obstacle = self._data_position.restore(state["data"])
        if obstacle:
            logger.warning(f"The order of data starts again: {obstacle}.")
        if hasattr(type(self._trainer), "_data_loader_iter"):
            self._trainer._data_loader_iter  # making an iterator draws from torch's generator: before the next line
        random_state.restore(state["random"])
        for hook in self._hooks:
            if type(hook) is hooks.EvalHook:
                hook.catch_up()


class PrecisionTrainer(PrecisionTrainerMixin, DefaultTrainer):
    """DefaultTrainer with a precision policy and an evaluator for every data set type of Detectron2.

    The cfg must have our keys: `d2amp_ext.load_cfg`, or `add_amp_config` on one of your own.
    """

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        return build_evaluator(cfg, dataset_name, output_folder)


def _from_registry(name):
    if name not in TRAINER_REGISTRY:
        known = ", ".join(key for key, _ in TRAINER_REGISTRY)
        raise UserError(f"SOLVER.AMP.TRAINER = {name!r} is not in TRAINER_REGISTRY. Registered: {known}.")
    return TRAINER_REGISTRY.get(name)


@contextlib.contextmanager
def _ddp_of(cfg):
    """While DefaultTrainer's constructor runs: DDP with the arguments of SOLVER.DDP, on CPUs too, and no warnings of
    torch about the CUDA scaler that it makes and that is thrown away.

    The constructor wraps the model inline, so the name that it looks up is exchanged for as long as it runs.
    """
    stock = defaults.create_ddp_model

    def create_ddp_model(model, **kwargs):
        kwargs.update((name.lower(), value) for name, value in cfg.SOLVER.DDP.items())
        if next(model.parameters()).device.type == "cpu":
            kwargs["device_ids"] = None
        return stock(model, **kwargs)

    with _constructing, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.cuda\.amp\.GradScaler")
        defaults.create_ddp_model = create_ddp_model
        try:
            yield
        finally:
            defaults.create_ddp_model = stock
