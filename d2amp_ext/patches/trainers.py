"""Trainers of unedited code: DefaultTrainers get our mixin, inner trainers that a script makes become ours."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import types
import weakref

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer, SimpleTrainer

from ..build import build_inner_trainer
from ..default_trainer import PrecisionTrainerMixin
from ..policy import PrecisionPolicy
from ..scaling import scale_to_world
from ..trainer import AMPTrainer
from . import current, loops, models
from .standalone import Standalone, make_precise

_thread = threading.local()


class Installed(PrecisionTrainerMixin):
    """The mixin in front of a script's trainer. Models run in the precision of evaluation by themselves."""

    @classmethod
    def test(cls, *args, **kwargs):
        return super(PrecisionTrainerMixin, cls).test(*args, **kwargs)


def trainer_base_init(stock):
    """Of TrainerBase.__init__, which constructors that leave out DefaultTrainer's call as well."""

    def __init__(self, *args, **kwargs):
        if isinstance(self, DefaultTrainer) and not isinstance(self, PrecisionTrainerMixin):
            _mix_in(self)
            source = current.latest()
            if source is not None:
                current.prepare(source)
                current.warn_unused(source)
        stock(self, *args, **kwargs)

    return __init__


def default_trainer_init(stock):
    """Of DefaultTrainer.__init__."""

    def __init__(self, cfg):
        if isinstance(self, PrecisionTrainerMixin):  # it is one on purpose
            with _scaled():
                return stock(self, cfg)
        _mix_in(self)
        current.prepare(cfg)
        with self._constructing(cfg) as cfg, _scaled():
            current.note(cfg)
            stock(self, cfg)

    return __init__


def _mix_in(trainer):
    trainer.__class__ = _subclass((Installed, type(trainer)), type(trainer))
    current.touched.add("trainer")


@contextlib.contextmanager
def _scaled():
    """A context in which the mixin has scaled the config already."""
    before, _thread.scaled = getattr(_thread, "scaled", False), True
    try:
        yield
    finally:
        _thread.scaled = before


def scaling_workers(stock):
    """Of DefaultTrainer.auto_scale_workers, which knows no accumulation; for constructors without Detectron2's."""

    def auto_scale_workers(cfg, num_workers):
        if current.is_config(cfg) and not getattr(_thread, "scaled", False):
            current.adopt(cfg)
            cfg = scale_to_world(cfg, num_workers)
        return stock(cfg, num_workers)

    return staticmethod(auto_scale_workers)


def inner_trainer_init(base):
    """Of the __init__ of `base`, SimpleTrainer or Detectron2's AMPTrainer."""

    def make(stock):
        signature = inspect.signature(stock)

        def __init__(self, *args, **kwargs):
            # What AMPTrainer's constructor has decided is not asked again by SimpleTrainer's.
            decided = isinstance(self, AMPTrainer) or (base is SimpleTrainer and isinstance(self, StockAMPTrainer))
            if decided or not _take_over(self, base, signature, args, kwargs):
                stock(self, *args, **kwargs)

        return __init__

    return make


def _take_over(trainer, base, signature, args, kwargs):
    """Turns a trainer that is being made into ours if AMP is on and its step is stock. Returns whether it did."""
    try:
        given = signature.bind(trainer, *args, **kwargs).arguments
    except TypeError:
        return False  # Detectron2 says it better
    model, loader, optimizer = (given.pop(name) for name in ("model", "data_loader", "optimizer"))
    given.pop("self")
    cfg, kind = models.settings_of(model), type(trainer)
    current.touched.add("trainer")
    models.serve(model)
    if cfg is None or not cfg.SOLVER.AMP.ENABLED:
        return False
    own = next((owner for owner in _owners_of_steps(kind, base) if not _calls(owner.run_step, "run_step")), None)
    if own is not None:
        current.tell(
            f"{own.__name__}.run_step is a training step of the script's own and is left alone: there is no guard, and "
            "a gradient scaler only if it has one.",
            logging.WARNING,
        )
        return False
    if any(getattr(kind, name) is not getattr(SimpleTrainer, name) for name in ("_write_metrics", "write_metrics")):
        current.tell(
            f"{kind.__name__} has a way of its own to write metrics, which d2amp_ext does not call: losses are written "
            "as always.",
            logging.WARNING,
        )
    precision, scaler = given.pop("precision", None), given.pop("grad_scaler", None)
    policy = _policy(cfg, precision).resolve(next(model.parameters()).device, "Precision of training")
    with loops.making_trainer():
        made = build_inner_trainer(cfg, policy, model, loader, optimizer, **given)
    if scaler is not None and policy.uses_scaler:
        made.grad_scaler = scaler
    vars(trainer).update(vars(made))
    bases = (Standalone, type(made)) if kind is base else (Standalone, kind, type(made))
    trainer.__class__ = _subclass(bases, kind)
    for hook in trainer._hooks:
        hook.trainer = weakref.proxy(trainer)
    return True


def _owners_of_steps(kind, base):
    """The classes below `base` that have a `run_step`."""
    return [owner for owner in kind.__mro__[: kind.__mro__.index(base)] if "run_step" in vars(owner)]


def _calls(function, name):
    """Whether the source of a function has a call of `something.name`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    codes = [code] if code else []
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(name in code.co_names for code in codes)


def _policy(cfg, precision):
    """What the config says; where that is "auto", what the script passed as AMPTrainer's `precision`."""
    policy = PrecisionPolicy.from_cfg(cfg)
    if precision is None:
        return policy
    scripts = PrecisionPolicy(precision).precision
    if policy.precision == "auto":
        return dataclasses.replace(policy, precision=scripts)
    if policy.precision != scripts:
        text = f"The script asks AMPTrainer for {scripts}; SOLVER.AMP.PRECISION {policy.precision} counts."
        current.tell(text, logging.WARNING)
    return policy


@functools.lru_cache(maxsize=None)
def _subclass(bases, like):
    """A subclass that goes by the name of `like`."""
    return type(like)(like.__name__, bases, {"__module__": like.__module__, "__qualname__": like.__qualname__})


def checkpointer_init(stock):
    """Of DetectionCheckpointer.__init__: that of a trainer of ours writes whole files, with what a resume needs."""

    def __init__(self, model, *args, **kwargs):
        stock(self, model, *args, **kwargs)
        if current.trust:
            self.trust = True
        if current.latest() is not None:
            models.serve(model)
        for item in list(self.checkpointables.values()):
            if isinstance(item, Standalone):
                make_precise(self)
                if "resume" not in self.checkpointables:
                    self.add_checkpointable("resume", item.resume_state)

    return __init__
