"""The ranking of modules: planted faults come first, errors of others do not count, and nothing is left behind."""

import copy
import math

import pytest
import torch
from audit_models import grid, policy
from torch import nn

from d2amp_ext import random_state
from d2amp_ext.audit.modules import rank
from d2amp_ext.numerics.protect import protect


def ranking(model, precision, batch, training=True, **options):
    chosen = policy(precision, **options)
    low = copy.deepcopy(model)
    protect(low, chosen)
    return rank(low, model, chosen, policy("fp32"), batch, random_state.capture(), training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fault, precision, module, cls, least", [
    ("cancels", "bf16", "body.4", "Careful", 0.1),
    ("decodes", "bf16", "head", "Head", 0.01),
    ("overflows", "fp16", "body.3", "Conv2d", math.inf),
])  # fmt: skip
def test_a_planted_fault_comes_first(fault, precision, module, cls, least, training):
    model, batches, images = grid(fault)
    first, *others = ranking(model, precision, batches[0] if training else images[:1], training)
    assert (first.name, first.cls) == (module, cls) and first.error >= least
    assert first.error > 3 * max((one.error for one in others if one.name != "head"), default=0)
    assert first.mode == ("training" if training else "evaluation")


def test_without_a_fault_every_module_adds_what_rounding_does():
    model, batches, _ = grid()
    for precision, step in (("bf16", 2**-8), ("fp16", 2**-11)):
        added = ranking(model, precision, batches[0])
        assert 0 < added[0].error < 1.5 * step and sum(one.error > 0 for one in added) >= 3
        assert [one.error for one in added] == sorted((one.error for one in added), reverse=True)
        convolution = next(one for one in added if one.name == "body.0")
        assert convolution.dtype == {"bf16": "bfloat16", "fp16": "float16"}[precision] and convolution.largest > 0.1
    assert all(one.error == 0 for one in ranking(model, "fp32", batches[0]))
    assert all(one.error == 0 for one in ranking(model, "bf16", batches[0], fp32_modules=("*",)) if one.name)


def test_what_came_in_and_what_is_inside_do_not_count():
    """Everything behind the bad layer is wrong by the same amount, and has no part in it."""
    model, batches, _ = grid("cancels")
    errors = {one.name: one.error for one in ranking(model, "bf16", batches[0])}
    assert errors["body.4"] > 0.1 and errors["body"] == 0 and errors["head.out"] < 0.01 and errors[""] < 0.01


class Offset(nn.Module):
    """Outputs of 1000 with a spread of 1, as a normalization layer gets them that has to take the mean away."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        nn.init.constant_(self.first.bias, 1000.0)

    def forward(self, batch):
        return {"loss": self.second(self.norm(self.first(batch[0]["x"]))).float().square().mean()}


@pytest.mark.parametrize("inside", [False, True])
def test_what_goes_to_a_normalization_layer_is_compared_behind_it(inside):
    torch.manual_seed(0)
    model = Offset()
    if inside:  # as in Detectron2's convolutions
        model.first = Normed(model.first, model.norm)
        model.norm = nn.Identity()
    first, second, *_ = ranking(model, "bf16", [{"x": torch.randn(64, 8)}])
    assert first.name == ("first.linear" if inside else "first") and first.error > 0.5 > 100 * second.error
    assert ranking(model, "bf16", [{"x": torch.randn(64, 8)}], training=False)[0].error < 0.01  # it takes nothing away


class Normed(nn.Module):
    def __init__(self, linear, norm):
        super().__init__()
        self.linear, self.norm = linear, norm

    def forward(self, x):
        return self.norm(self.linear(x))


class Draws(nn.Module):
    """Own code that draws before and after a module that draws, too, and changes its input in place."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, batch):
        x = batch[0]["x"] * torch.rand(4, 8)
        x = self.relu(self.dropout(x))
        return {"loss": (x[torch.randperm(4)[:2]]).sum()}


def test_random_draws_and_changes_in_place_are_no_errors():
    torch.manual_seed(0)
    assert [one.error for one in ranking(Draws(), "bf16", [{"x": torch.randn(4, 8)}])] == [0.0] * 3


def test_nothing_is_left_behind():
    model, batches, _ = grid()
    low = copy.deepcopy(model)
    state, random = copy.deepcopy(low.state_dict()), random_state.capture()
    attributes = [set(vars(module)) for module in low.modules()]
    rank(low, model, policy("bf16"), policy("fp32"), batches[0], random_state.capture(), True)
    assert all(torch.equal(value, state[name]) for name, value in low.state_dict().items())
    assert torch.equal(random_state.capture()["torch"], random["torch"])
    for module, before in zip([*low.modules()], attributes):
        assert set(vars(module)) == before and "forward" not in vars(module)
    assert "forward" not in vars(model.head)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        nn.init.constant_(self.first.weight, 1e5)

    def forward(self, batch):
        x = self.first(batch[0]["x"])
        if not torch.isfinite(x).all():
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        return {"loss": x.float().mean()}


def test_a_forward_that_gives_up_is_measured_until_then():
    added = ranking(Raises(), "fp16", [{"x": torch.ones(4, 8)}])
    assert [(one.name, one.error) for one in added] == [("first", math.inf)]
