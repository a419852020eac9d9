"""Detectron2's default hooks where a skipped update, several ranks or an exact resume ask for more.

Class names are Detectron2's: a checkpoint stores the state of a hook under the name of its class.
"""

import math
import warnings

from detectron2.engine import HookBase, hooks


class LRScheduler(hooks.LRScheduler):
    """Steps the schedule after every iteration, or with `hold_on_skip` only after iterations that made an update."""

    def __init__(self, optimizer=None, scheduler=None, hold_on_skip=False):
        super().__init__(optimizer, scheduler)
        self._hold_on_skip = hold_on_skip

    def after_step(self):
        step = getattr(self.trainer, "last_step", None)
        if step is None or not step.skipped:
            super().after_step()
        elif self._hold_on_skip:
            rate = self._optimizer.param_groups[self._best_param_group_id]["lr"]
            self.trainer.storage.put_scalar("lr", rate, smoothing_hint=False)
        else:
            with warnings.catch_warnings():
                # True when the first updates are skipped, and nothing that a user could act on.
                warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
                super().after_step()


class PeriodicCheckpointer(hooks.PeriodicCheckpointer):
    """Saves on the main rank, with the random states and data positions of all. Registered on every rank.

    Attributes:
        resume_state (ResumeState or None): gathers those.
    """

    resume_state = None

    def after_step(self):
        if self.resume_state is not None and self.is_due():
            self.resume_state.gather()
        super().after_step()

    def save_again(self):
        """Writes the checkpoint of this iteration anew, without counting it a second time for `max_to_keep`."""
        keep, self.max_to_keep = self.max_to_keep, None
        try:
            self.after_step()
        finally:
            self.max_to_keep = keep

    def is_due(self):
        """Whether a checkpoint is written after this iteration."""
        done = self.trainer.iter + 1
        return (self.period > 0 and done % self.period == 0) or done >= self.trainer.max_iter


class EvalHook(hooks.EvalHook):
    """Evaluates, then writes a checkpoint of this iteration again, for evaluation draws random numbers.

    The checkpoint written before it, which a failing evaluation must not cost, says that evaluation is still to come:
    a run resumed from that one evaluates first.

    Attributes:
        resume_state (ResumeState or None): remembers which iteration was evaluated.
    """

    resume_state = None

    def _do_eval(self):
        evaluate, self._func = self._func, lambda: finite(evaluate())
        try:
            super()._do_eval()
        finally:
            self._func = evaluate

    def after_step(self):
        super().after_step()
        if self.resume_state is None or not self._is_due(self.trainer.iter + 1):
            return
        self.resume_state.evaluated_iter = self.trainer.iter
        for hook in self.trainer._hooks:
            if type(hook) is PeriodicCheckpointer and hook.is_due():
                hook.save_again()

    def _is_due(self, iterations_done):
        return self._period > 0 and iterations_done % self._period == 0 and iterations_done != self.trainer.max_iter

    def catch_up(self):
        """Evaluates at the start of a resumed run if its checkpoint was written just before an evaluation."""
        trainer = self.trainer
        if self._is_due(trainer.start_iter) and self.resume_state.evaluated_iter != trainer.start_iter - 1:
            trainer.storage.iter = trainer.start_iter - 1
            self._do_eval()
            self.resume_state.evaluated_iter = trainer.start_iter - 1
            trainer.storage.iter = trainer.start_iter


def exchange(built, resume_state, hold_lr_on_skip=False, on_other_ranks=None):
    """A list of hooks with Detectron2's own exchanged for those of this module. A subclass stays what it is.

    Args:
        built (list[HookBase or None]): as a trainer registers them.
        resume_state (ResumeState):
        hold_lr_on_skip (bool): whether the LR schedule waits when an update is skipped.
        on_other_ranks (tuple or None): the checkpointer and the period of a PeriodicCheckpointer for ranks other than
            the main one, where Detectron2 has none. None on the main rank.
    """
    hooks_of_ours = []
    for hook in built:
        if type(hook) is hooks.LRScheduler:
            hook.__class__ = LRScheduler
            hook._hold_on_skip = hold_lr_on_skip
        elif type(hook) is hooks.PeriodicCheckpointer:
            hook.__class__ = PeriodicCheckpointer
            hook.resume_state = resume_state
        elif type(hook) is hooks.EvalHook:
            hook.__class__ = EvalHook
            hook.resume_state = resume_state
            if on_other_ranks:
                on_other_ranks, gatherer = None, PeriodicCheckpointer(*on_other_ranks)
                gatherer.resume_state = resume_state
                hooks_of_ours.append(gatherer)
        hooks_of_ours.append(hook)
    return hooks_of_ours


class Resume(HookBase):
    """Restores a ResumeState before the first step. For a trainer that runs its own loop; registered last."""

    def __init__(self, resume_state):
        self._resume_state = resume_state

    def before_train(self):
        restore(self.trainer, self._resume_state, self.trainer)


def restore(trainer, resume_state, inner):
    """Puts a loaded ResumeState back, then evaluates what the checkpoint says is still to be evaluated.

    Args:
        trainer (TrainerBase): with the hooks.
        resume_state (ResumeState):
        inner (TrainerBase): that takes the data; the same one, or the one inside a DefaultTrainer.
    """
    if not resume_state.resumed:
        return
    resume_state.restore(lambda: getattr(inner, "_data_loader_iter", None))
    for hook in trainer._hooks:
        if type(hook) is EvalHook:
            hook.catch_up()


def finite(results):
    """Nested results without NaN and infinity, which JSON cannot hold; COCO's figures are NaN where nothing is to find."""
    if not isinstance(results, dict):
        return results
    nested = {name: finite(value) for name, value in results.items()}
    return {name: value for name, value in nested.items() if isinstance(value, dict) or not _is_infinite(value)}


def _is_infinite(value):
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False  # no number: Detectron2 says so, and names it


class AfterBackward(HookBase):
    """Passes `after_backward` of the inner trainer on to the hooks of the outer one, which Detectron2 leaves out."""

    def __init__(self, outer):
        """
        Args:
            outer: a weak proxy of the outer trainer.
        """
        self._outer = outer

    def after_backward(self):
        for hook in self._outer._hooks:
            hook.after_backward()
