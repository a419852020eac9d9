"""The hooks by themselves. What they do in a run is in test_default_trainer.py."""

import math
import weakref
from types import SimpleNamespace

import pytest
from detectron2.engine import HookBase
from detectron2.engine import hooks as stock

from d2amp_ext import hooks


def test_names_are_detectron2s_so_that_checkpoints_go_both_ways():
    for name in ("LRScheduler", "PeriodicCheckpointer", "EvalHook"):
        assert issubclass(getattr(hooks, name), getattr(stock, name))
        assert getattr(hooks, name).__qualname__ == getattr(stock, name).__qualname__


def test_results_without_what_json_cannot_hold():
    results = {"bbox": {"AP": 1.0, "APl": math.nan, "deep": {"x": math.inf, "y": "2.5"}}, "n": 3}
    assert hooks.finite(results) == {"bbox": {"AP": 1.0, "deep": {"y": "2.5"}}, "n": 3}
    assert hooks.finite(None) is None


class Checkpoints:
    def __init__(self):
        self.saved, self.path_manager = [], None

    def save(self, name, **extra):
        self.saved.append(name)


class Trainer:
    """What hooks ask of a trainer."""

    def __init__(self, max_iter, results=None):
        self.iter = self.start_iter = 0
        self.max_iter = max_iter
        self.evaluated_iter = -1
        self.gathered = []
        self.evaluations = []
        self.storage = SimpleNamespace(iter=0, put_scalars=lambda **scalars: None)
        self.checkpointer = Checkpoints()
        self._hooks = []

    def gather_rank_states(self):
        self.gathered.append(self.iter)

    def make(self, checkpoint_period, eval_period):
        self._hooks = [
            hooks.PeriodicCheckpointer(self.checkpointer, checkpoint_period),
            hooks.EvalHook(eval_period, lambda: self.evaluations.append(self.storage.iter) or {}),
        ]
        for hook in self._hooks:
            hook.trainer = weakref.proxy(self)
        self._hooks[0].before_train()
        return self

    def run(self):
        for self.iter in range(self.start_iter, self.max_iter):
            self.storage.iter = self.iter
            for hook in self._hooks:
                hook.after_step()


def test_rank_states_are_gathered_when_a_checkpoint_is_due_and_not_otherwise():
    trainer = Trainer(7).make(checkpoint_period=3, eval_period=0)
    trainer.run()
    assert trainer.gathered == [2, 5, 6]
    assert trainer.checkpointer.saved == ["model_0000002", "model_0000005", "model_final"]


def test_an_evaluation_writes_the_checkpoint_of_its_iteration_again():
    trainer = Trainer(6).make(checkpoint_period=2, eval_period=4)
    trainer.run()
    assert trainer.evaluations == [3] and trainer.evaluated_iter == 3
    assert trainer.checkpointer.saved == ["model_0000001", "model_0000003", "model_0000003", "model_final"]


@pytest.mark.parametrize("evaluated, expected", [(-1, [3]), (3, [])])
def test_catching_up_after_a_checkpoint_that_was_written_before_its_evaluation(evaluated, expected):
    trainer = Trainer(8).make(checkpoint_period=4, eval_period=4)
    trainer.start_iter, trainer.evaluated_iter = 4, evaluated
    trainer._hooks[1].catch_up()
    assert trainer.evaluations == expected and trainer.evaluated_iter == 3


def test_after_backward_is_passed_on():
    class Count(HookBase):
        calls = 0

        def after_backward(self):
            self.calls += 1

    outer = SimpleNamespace(_hooks=[Count(), Count()])
    hooks.AfterBackward(outer).after_backward()
    assert [hook.calls for hook in outer._hooks] == [1, 1]
