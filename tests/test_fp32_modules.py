"""SOLVER.AMP.FP32_MODULES: which modules a pattern means, on every road."""

import pytest
import torch
from conftest import TinyModel, tiny_data
from test_island import Picky
from torch import nn

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions, UserError
from d2amp_ext.numerics.island import stock_class
from d2amp_ext.numerics.modules import keep_in_fp32


class WithPicky(TinyModel):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"one": Picky(16), "two": nn.Sequential(Picky(16), nn.ReLU())})

    def forward(self, batch):
        x = torch.cat([sample["x"] for sample in batch])
        hidden = self.heads["two"](self.heads["one"](torch.relu(self.first(x))))
        loss = (self.second(hidden).float() - 1).pow(2).mean()
        return {"loss": loss}


def islands(model):
    return [name for name, module in model.named_modules() if getattr(type(module), "is_island", False)]


@pytest.mark.parametrize(
    "patterns, expected",
    [
        (["heads.one"], ["heads.one"]),
        (["heads.*"], ["heads.one", "heads.two", "heads.two.0", "heads.two.1"]),
        (["Picky"], ["heads.one", "heads.two.0"]),
        (["P?cky", "second"], ["second", "heads.one", "heads.two.0"]),
        ([], []),
    ],
)
def test_names_and_classes_are_matched(patterns, expected):
    model = WithPicky()
    matched = keep_in_fp32(model, patterns)
    assert sorted(islands(model)) == sorted(expected) and list(matched) == patterns
    assert keep_in_fp32(model, patterns) == matched and sorted(islands(model)) == sorted(expected)
    assert all(stock_class(module).__name__ == type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("pattern, near", [("head.one", "heads.one"), ("Pickky", "Picky"), ("*.fist", "first"), ("zzz", "heads")])
def test_a_pattern_without_a_match_names_near_ones(pattern, near):
    with pytest.raises(UserError) as error:
        keep_in_fp32(WithPicky(), ["first", pattern])
    assert repr(pattern) in str(error.value) and near in str(error.value) and "FP32_MODULES" in str(error.value)
    assert islands(model := WithPicky()) == [] and model is not None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_with_an_fp32_only_operator_trains_with_one_line(precision):
    def train(policy):
        model = WithPicky()
        trainer = AMPTrainer(model, tiny_data(), torch.optim.SGD(model.parameters(), lr=0.01), policy=policy)
        trainer.train(0, 3)
        return trainer

    with pytest.raises(RuntimeError, match="picky"):
        train(PrecisionPolicy(precision))
    trainer = train(PrecisionPolicy(precision, fp32_modules=("Picky",), scaler=ScalerOptions(init_scale=256.0)))
    assert trainer.last_step.skips == 0 and trainer.iter == 3
    assert trainer.protection.fp32_modules == {"Picky": ["heads.one", "heads.two.0"]}
    assert "'Picky': heads.one, heads.two.0" in trainer.protection.describe()


def test_in_fp32_nothing_changes():
    def losses(patterns):
        model = WithPicky()
        policy = PrecisionPolicy("fp32", fp32_modules=patterns)
        trainer = AMPTrainer(model, tiny_data(), torch.optim.SGD(model.parameters(), lr=0.01), policy=policy)
        trainer.train(0, 5)
        return [value for value, _ in trainer.storage.history("total_loss").values()]

    assert losses(("heads.*",)) == losses(())


def test_under_torch_compile_and_its_wrapper():
    model = WithPicky()
    compiled = torch.compile(model, backend="eager")
    assert keep_in_fp32(compiled, ["heads.one", "Picky"])["heads.one"] == ["heads.one"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(compiled(tiny_data(1)[0])["loss"])
