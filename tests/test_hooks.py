"""Our versions of Detectron2's hooks, in a real loop with a tiny model."""

import json
import logging
import math
import os
import weakref

import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.engine import HookBase, TrainerBase
from detectron2.engine import hooks as stock
from detectron2.solver import LRMultiplier
from fvcore.common.param_scheduler import LinearParamScheduler

from d2amp_ext import AMPTrainer, PrecisionCheckpointer, PrecisionPolicy, hooks
from d2amp_ext.resume import ResumeState


class Gathering(ResumeState):
    """Notes the iterations at which the states of ranks are gathered."""

    def gather(self):
        self.gathered.append(self._trainer.iter)
        super().gather()


class Loop(TrainerBase):
    """What the hooks need of PrecisionTrainer: an inner trainer and a resume state."""

    def __init__(self, folder=None, spoil=(), steps=10):
        super().__init__()
        self.model = TinyModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inner = AMPTrainer(self.model, tiny_data(40, spoil), self.optimizer, policy=PrecisionPolicy("fp32"))
        self.steps = steps
        self.resume_state = Gathering(weakref.proxy(self), self.inner.data_loader)
        self.gathered = self.resume_state.gathered = []
        if folder is not None:
            self.checkpointer = PrecisionCheckpointer(self.model, str(folder), trainer=weakref.proxy(self))

    @property
    def last_step(self):
        return self.inner.last_step

    def run_step(self):
        self.inner.iter = self.iter
        self.inner.run_step()

    def state_dict(self):
        return {**super().state_dict(), **self.resume_state.state_dict()}

    def go(self, *hooks, start=0):
        for hook in hooks:
            if hasattr(hook, "resume_state"):
                hook.resume_state = self.resume_state
        self.register_hooks(list(hooks))
        self.train(start, self.steps)
        return self


def test_class_names_are_those_under_which_detectron2_saves_their_state():
    for cls in (hooks.LRScheduler, hooks.PeriodicCheckpointer, hooks.EvalHook):
        base = getattr(stock, cls.__name__)
        assert issubclass(cls, base) and cls.__qualname__ == base.__qualname__
        assert set(vars(cls)) & {"__init__"} <= ({"__init__"} if cls is hooks.LRScheduler else set())  # classes are swapped


# LRScheduler


class Rates(HookBase):
    def __init__(self):
        self.rates = []

    def after_step(self):
        self.rates.append(round(self.trainer.optimizer.param_groups[0]["lr"], 6))


def rates(hook_class, spoil=(), steps=6, **options):
    loop = Loop(spoil=spoil, steps=steps)
    scheduler = LRMultiplier(loop.optimizer, multiplier=LinearParamScheduler(1.0, 0.0), max_iter=10)
    seen = Rates()
    loop.go(hook_class(loop.optimizer, scheduler, **options), seen)
    return seen.rates, [round(value, 6) for value, _ in loop.storage.history("lr").values()]


@pytest.mark.parametrize("hold", [False, True])
def test_without_skips_the_schedule_is_detectron2s(hold):
    assert rates(hooks.LRScheduler, hold_on_skip=hold) == rates(stock.LRScheduler)


def test_the_rate_is_a_function_of_the_iteration_by_default():
    assert rates(hooks.LRScheduler, spoil={1, 2}) == rates(stock.LRScheduler)


def test_a_held_schedule_waits_for_the_update_and_writes_the_rate_all_the_same():
    after, seen = rates(hooks.LRScheduler, spoil={1, 2}, hold_on_skip=True)
    assert after == [0.09, 0.09, 0.09, 0.08, 0.07, 0.06]
    assert seen == [0.1, 0.09, 0.09, 0.09, 0.08, 0.07]  # the rate that the step used


@pytest.mark.parametrize("hold", [False, True])
def test_skips_at_the_start_warn_about_nothing(hold, recwarn):
    rates(hooks.LRScheduler, spoil={0, 1}, hold_on_skip=hold)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_without_a_record_there_are_no_skips():
    """AMP is off, or the inner trainer is a project's own."""
    loop = Loop(steps=2)
    loop.run_step = lambda: None  # last_step stays None
    scheduler = LRMultiplier(loop.optimizer, multiplier=LinearParamScheduler(1.0, 0.0), max_iter=10)
    loop.go(hooks.LRScheduler(loop.optimizer, scheduler, True))
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.08)


# PeriodicCheckpointer


@pytest.mark.parametrize("period, steps, due", [(3, 8, [2, 5, 7]), (4, 8, [3, 7]), (100, 5, [4]), (1, 3, [0, 1, 2])])
def test_rank_states_are_gathered_where_a_checkpoint_is_written(tmp_path, period, steps, due):
    loop = Loop(tmp_path, steps=steps)
    loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, period))
    assert loop.gathered == due
    numbered = [iteration for iteration in due if (iteration + 1) % period == 0]
    expected = {f"model_{iteration:07d}.pth" for iteration in numbered} | {"model_final.pth", "last_checkpoint"}
    assert set(os.listdir(tmp_path)) == expected


def test_other_ranks_gather_and_write_nothing(tmp_path):
    loop = Loop(tmp_path, steps=4)
    loop.checkpointer.save_to_disk = False
    loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, 2))
    assert loop.gathered == [1, 3] and os.listdir(tmp_path) == []


# EvalHook


class Evaluate:
    """An evaluation that notes when it ran and which checkpoints were there."""

    def __init__(self, folder=None, results=lambda: {"bbox": {"AP": 50.0}}):
        self.folder, self.results, self.calls, self.before = folder, results, 0, []

    def __call__(self):
        self.calls += 1
        if self.folder:
            self.before.append(sorted(name for name in os.listdir(self.folder) if name.endswith(".pth")))
        return self.results()


def saved(folder, name):
    return torch.load(folder / name, weights_only=True)["trainer"]


def test_a_checkpoint_is_there_before_the_evaluation_and_says_afterwards_that_it_is_done(tmp_path):
    loop, evaluate = Loop(tmp_path, steps=6), Evaluate(tmp_path)
    between = []

    def results():
        between.append(saved(tmp_path, sorted(evaluate.before[-1])[-1])["evaluated_iter"])
        return {"bbox": {"AP": 1.0}}

    evaluate.results = results
    loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, 2), hooks.EvalHook(2, evaluate))
    assert evaluate.before[:2] == [["model_0000001.pth"], ["model_0000001.pth", "model_0000003.pth"]]
    assert between[:2] == [-1, 1]  # the evaluation of this iteration is still to come
    assert saved(tmp_path, "model_0000001.pth")["evaluated_iter"] == 1
    assert saved(tmp_path, "model_0000003.pth")["evaluated_iter"] == 3
    assert evaluate.calls == 3 and loop.gathered == [1, 1, 3, 3, 5]  # the last is evaluated at the end, as in Detectron2


def test_an_evaluation_without_a_checkpoint_writes_none(tmp_path):
    loop, evaluate = Loop(tmp_path, steps=5), Evaluate()
    loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, 4), hooks.EvalHook(2, evaluate))
    assert loop.gathered == [3, 3, 4] and evaluate.calls == 3
    assert set(os.listdir(tmp_path)) == {"model_0000003.pth", "model_final.pth", "last_checkpoint"}


@pytest.mark.parametrize("keep", [1, 2])
def test_the_second_writing_does_not_count_for_what_is_kept(tmp_path, keep):
    """Found: with max_to_keep=1 the checkpoint that had just been written twice was deleted, and none was left."""
    loop = Loop(tmp_path, steps=9)
    seen = []

    class Look(HookBase):
        def after_step(self):
            seen.append(sorted(int(name[6:13]) for name in os.listdir(tmp_path) if name.startswith("model_0")))

    loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, 2, max_to_keep=keep), hooks.EvalHook(2, Evaluate()), Look())
    done = [[1], [1], [3], [3], [5], [5], [7], [7]] if keep == 1 else [[1], [1], [1, 3], [1, 3], [3, 5], [3, 5], [5, 7], [5, 7]]
    assert seen == [[], *done]
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_a_failing_evaluation_costs_no_checkpoint(tmp_path):
    loop = Loop(tmp_path, steps=6)

    def fail():
        raise RuntimeError("the evaluator broke")

    with pytest.raises(RuntimeError, match="broke"):
        loop.go(hooks.PeriodicCheckpointer(loop.checkpointer, 2), hooks.EvalHook(2, Evaluate(results=fail)))
    assert saved(tmp_path, "model_0000001.pth")["evaluated_iter"] == -1
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"


@pytest.mark.parametrize(
    "start, evaluated, period, calls",
    [
        (4, 1, 2, 1),  # killed between checkpoint and evaluation
        (4, 3, 2, 0),  # killed after the evaluation
        (3, 1, 2, 0),  # none was due
        (4, 1, 0, 0),  # evaluation is off
        (10, 1, 2, 0),  # the one at the end, which is made in any case
    ],
)
def test_catching_up(tmp_path, start, evaluated, period, calls):
    loop, evaluate = Loop(tmp_path), Evaluate()
    hook = hooks.EvalHook(period, evaluate)
    hook.resume_state = loop.resume_state
    loop.register_hooks([hook])
    loop.start_iter, loop.max_iter, loop.resume_state.evaluated_iter = start, 10, evaluated
    from detectron2.utils.events import EventStorage

    with EventStorage(start) as loop.storage:
        hook.catch_up()
        hook.catch_up()
        assert evaluate.calls == calls and loop.storage.iter == start
        if calls:
            assert loop.storage.history("bbox/AP").values() == [(50.0, 3)]  # under the iteration that it belongs to


RESULTS = {
    "bbox": {"AP": 12.5, "AP50": math.nan, "per class": {"a": math.inf, "b": 1}},
    "count": 3,
    "tensor": torch.tensor(2.0),
    "empty": {},
}


def test_figures_that_json_cannot_hold_are_left_out():
    """COCO's figures are NaN where there is nothing to find."""
    found = hooks.finite(RESULTS)
    assert found == {"bbox": {"AP": 12.5, "per class": {"b": 1}}, "count": 3, "tensor": torch.tensor(2.0), "empty": {}}
    json.dumps(found["bbox"], allow_nan=False)
    assert hooks.finite(None) is None and hooks.finite({}) == {}
    assert math.isnan(RESULTS["bbox"]["AP50"])  # the results themselves stay


def test_the_storage_gets_the_finite_figures(tmp_path):
    loop = Loop(steps=2)
    loop.go(hooks.EvalHook(1, Evaluate(results=lambda: RESULTS)))
    latest = loop.storage.latest()
    assert {"bbox/AP", "bbox/per class/b", "count", "tensor"} <= latest.keys()
    assert not {"bbox/AP50", "bbox/per class/a"} & latest.keys()


def test_results_that_are_no_numbers_are_named():
    """Found: the message was that of `float`, without the name that Detectron2 gives."""
    with pytest.raises(ValueError, match="bbox/what: words"):
        Loop(steps=2).go(hooks.EvalHook(1, Evaluate(results=lambda: {"bbox": {"what": "words"}})))


# AfterBackward


def test_after_backward_goes_to_every_hook_of_the_outer_trainer():
    calls = []

    class Note(HookBase):
        def __init__(self, name):
            self.name = name

        def after_backward(self):
            calls.append((self.name, self.trainer.iter))

    outer = Loop(steps=2)
    outer.inner.register_hooks([hooks.AfterBackward(weakref.proxy(outer))])
    outer.go(Note("a"), Note("b"))
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_the_outer_trainer_is_not_kept_alive():
    outer = Loop()
    inner = outer.inner
    inner.register_hooks([hooks.AfterBackward(weakref.proxy(outer))])
    gone = weakref.ref(outer)
    del outer
    assert gone() is None


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "detectron2")
