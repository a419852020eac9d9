"""An inner trainer that a script makes and runs itself: what a DefaultTrainer would have around it."""

import functools
import weakref

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import hooks as stock_hooks
from detectron2.utils import comm

from .. import hooks
from ..build import write_bundles
from ..checkpoint import PrecisionCheckpointer
from ..monitor import build_monitor_hooks, place, writers_of
from ..resume import ResumeState
from . import models


class Standalone:
    """In front of an inner trainer that a script makes and runs itself: its hooks are exchanged, it resumes exactly."""

    watched = False  # whether it has the monitor

    @functools.cached_property
    def resume_state(self):
        return ResumeState(weakref.proxy(self), self.data_loader)

    def register_hooks(self, new):
        new = [hook for hook in new if hook is not None]
        if not all(isinstance(hook, hooks.AfterBackward) for hook in new):
            cfg = models.settings_of(self.model)
            new = hooks.exchange(new, self.resume_state, cfg is not None and cfg.SOLVER.AMP.HOLD_LR_ON_SKIP)
            for hook in new:
                if isinstance(hook, stock_hooks.PeriodicCheckpointer):
                    make_precise(hook.checkpointer)
        super().register_hooks(new)

    def before_train(self):
        if comm.get_world_size() > 1:
            self._gather_on_all_ranks()
        cfg = models.settings_of(self.model)
        if cfg is not None:
            write_bundles(cfg, self, *models.config_text_of(self.model))
            if not self.watched:
                self._watch(cfg)
        super().before_train()
        hooks.restore(self, self.resume_state, self)

    def _watch(self, cfg):
        """Adds the monitor when all hooks are there, on every rank."""
        writers = writers_of(self._hooks)
        watching = build_monitor_hooks(cfg, self.policy, self.model, self.optimizer, writers=writers)
        self.watched = True
        for hook in watching:
            hook.trainer = weakref.proxy(self)
        self._hooks = place(watching, self._hooks)

    def _gather_on_all_ranks(self):
        """A script has checkpoints on the main rank only; what they hold of the other ranks is gathered there."""
        periods = [hook.period for hook in self._hooks if type(hook) is hooks.PeriodicCheckpointer]
        period = next((period for rank in comm.all_gather(periods) for period in rank), None)
        if period is None or periods:
            return
        checkpointer = PrecisionCheckpointer(models.inside(self.model), save_to_disk=False)
        gatherer = hooks.PeriodicCheckpointer(checkpointer, period)
        gatherer.resume_state = self.resume_state
        gatherer.trainer = weakref.proxy(self)
        kinds = [type(hook) for hook in self._hooks]
        place = kinds.index(hooks.EvalHook) if hooks.EvalHook in kinds else len(kinds)
        self._hooks.insert(place, gatherer)


def make_precise(checkpointer):
    """Turns exactly Detectron2's checkpointer into ours."""
    if type(checkpointer) is DetectionCheckpointer:
        checkpointer.__class__ = PrecisionCheckpointer
