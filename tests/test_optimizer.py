"""ADAMW by Detectron2's per-parameter rules and clipping; SGD is Detectron2's own."""

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.solver import build_optimizer as stock_build_optimizer
from torch import nn

from d2amp_ext import PrecisionPolicy, PrecisionTrainer, PrecisionTrainerMixin, UserError, amp_step, load_cfg
from d2amp_ext.optimizer import build_optimizer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(4)
        self.frozen_bn = FrozenBatchNorm2d(4)
        self.head = nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 1)
        self.shared = self.head  # under two names
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)


def config(*opts):
    base = ["SOLVER.OPTIMIZER", "ADAMW", "SOLVER.BASE_LR", "0.001", "SOLVER.WEIGHT_DECAY", "0.05"]
    return load_cfg(None, [*base, *opts])


def build(cfg, model):
    return build_optimizer(cfg, model, stock=lambda *args: pytest.fail("SGD was not asked for"))


def settings(optimizer, model):
    """{parameter name: (learning rate, weight decay)}"""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_rates_and_decays_of_every_kind_of_parameter():
    model = Model()
    opts = ["SOLVER.WEIGHT_DECAY_NORM", "0.01", "SOLVER.BIAS_LR_FACTOR", "2.0", "SOLVER.WEIGHT_DECAY_BIAS", "0.0"]
    optimizer = build(config(*opts), model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert settings(optimizer, model) == {
        "conv.weight": (0.001, 0.05),
        "conv.bias": (0.002, 0.0),
        "bn.weight": (0.001, 0.01),
        "bn.bias": (0.002, 0.0),
        "group.weight": (0.001, 0.01),
        "group.bias": (0.002, 0.0),
        "layer.weight": (0.001, 0.01),
        "layer.bias": (0.002, 0.0),
        "head.weight": (0.001, 0.05),
        "head.bias": (0.002, 0.0),
    }


@pytest.mark.parametrize(
    "opts",
    [
        [],
        ["SOLVER.WEIGHT_DECAY_NORM", "0.0"],
        ["SOLVER.BIAS_LR_FACTOR", "2.0"],
        ["SOLVER.WEIGHT_DECAY_BIAS", "0.3"],
        ["SOLVER.BIAS_LR_FACTOR", "0.5", "SOLVER.WEIGHT_DECAY_NORM", "0.02", "SOLVER.WEIGHT_DECAY_BIAS", "0.01"],
    ],
)
def test_the_rules_are_those_of_detectron2s_sgd(opts):
    """Each parameter, shared and frozen ones too, gets the rate and the decay that it has in Detectron2's optimizer."""
    model, cfg = Model(), config(*opts)
    assert settings(build(cfg, model), model) == settings(stock_build_optimizer(cfg, model), model)


@pytest.mark.parametrize("spelt", ["ADAMW", "AdamW", "adamw"])
def test_any_case(spelt):
    assert isinstance(build(config("SOLVER.OPTIMIZER", spelt), Model()), torch.optim.AdamW)


def gradients_of(model, value):
    return sum((parameter * value).sum() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind, value, clip", [("value", 0.25, 0.25), ("norm", 0.5, None), ("full_model_none", 9.0, None)])
def test_clipping_really_clips(kind, value, clip, precision):
    """The first moment of AdamW after one step is 0.1 x the gradient that it was given: what came through the clipper."""
    model = Model()
    opts = ["SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", value]
    if kind == "full_model_none":
        opts[1] = "False"
    else:
        opts += ["SOLVER.CLIP_GRADIENTS.CLIP_TYPE", kind]
    optimizer = build(config(*opts), model)
    policy = PrecisionPolicy(precision).resolve("cpu")
    record = amp_step(gradients_of(model, 4.0), optimizer, policy=policy, scaler=policy.make_scaler())
    assert not record.skipped
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert record.grad_norm.item() == pytest.approx(4.0 * count**0.5, rel=1e-5)  # before clipping, unscaled
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            given = optimizer.state[parameter]["exp_avg"] / 0.1
            expected = {"value": clip, "norm": value / parameter.numel() ** 0.5, "full_model_none": 4.0}[kind]
            torch.testing.assert_close(given, torch.full_like(given, expected), rtol=1e-4, atol=1e-6)


def test_an_update_by_hand():
    """AdamW's first step moves by the learning rate, after the decay, whatever the size of the gradient."""
    model = Model()
    optimizer = build(config("SOLVER.WEIGHT_DECAY_NORM", "0.0"), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients_of(model, 3.0).backward()
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["conv.weight"], before["conv.weight"] * (1 - 0.001 * 0.05) - 0.001)
    torch.testing.assert_close(after["bn.weight"], before["bn.weight"] - 0.001)
    assert torch.equal(after["frozen.weight"], before["frozen.weight"])


@pytest.mark.parametrize("spelt", ["SGD", "sgd", "Sgd"])
def test_sgd_is_made_by_detectron2(spelt):
    model, cfg = Model(), config("SOLVER.OPTIMIZER", spelt)
    calls = []
    assert build_optimizer(cfg, model, stock=lambda *args: calls.append(args) or "theirs") == "theirs"
    assert calls == [(cfg, model)]


def test_the_trainers_sgd_is_stocks():
    model, cfg = Model(), config("SOLVER.OPTIMIZER", "SGD", "SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.BIAS_LR_FACTOR", "2.0")
    ours, stock = PrecisionTrainer.build_optimizer(cfg, model), stock_build_optimizer(cfg, model)
    assert ours.state_dict() == stock.state_dict() and settings(ours, model) == settings(stock, model)
    assert type(ours).__mro__[1] is torch.optim.SGD and type(ours).__name__ == type(stock).__name__  # with clipping


def test_the_trainer_builds_adamw():
    assert isinstance(PrecisionTrainer.build_optimizer(config(), Model()), torch.optim.AdamW)


def test_an_optimizer_that_a_class_builds_itself_wins():
    class Theirs:
        @classmethod
        def build_optimizer(cls, cfg, model):
            return torch.optim.Adagrad(model.parameters())

    class Mixed(PrecisionTrainerMixin, Theirs):
        pass

    assert isinstance(Mixed.build_optimizer(config(), Model()), torch.optim.Adagrad)


@pytest.mark.parametrize("spelt", ["LION", "adam", "", "SGD "])
def test_unknown_optimizers(spelt):
    with pytest.raises(UserError, match=f"SOLVER.OPTIMIZER = '{spelt}': must be SGD or ADAMW"):
        build(config("SOLVER.OPTIMIZER", spelt), Model())
