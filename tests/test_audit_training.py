"""Losses and gradients of two runs: the same draws, held choices, the scale of fp16, and the errors."""

import copy
import math

import pytest
import torch
from audit_models import grid, policy
from detectron2.structures import Boxes, Instances
from torch import nn

from d2amp_ext import random_state
from d2amp_ext.audit.choices import Choices
from d2amp_ext.audit.training import Training, gradient_errors, loss_errors, stages_of, train
from d2amp_ext.step import add_up


def test_losses_and_gradients_are_those_of_a_plain_step():
    model, batches, _ = grid()
    random = random_state.capture()
    found = train(model, policy("fp32"), batches, random)
    plain = copy.deepcopy(model).train()
    random_state.restore(random)
    losses = plain(batches[0])
    add_up(losses).backward()
    assert found.losses[0] == {name: loss.item() for name, loss in losses.items()}
    assert all(torch.equal(found.gradients[0][name], p.grad) for name, p in plain.named_parameters())
    assert found.scale == 1 and found.failure == ""


def test_every_batch_starts_from_the_same_random_state():
    model, batches, _ = grid()
    found = train(model, policy("bf16"), [batches[0], batches[0]], random_state.capture())
    assert found.losses[0] == found.losses[1]


def test_the_scale_of_fp16_falls_until_gradients_are_finite():
    model, batches, _ = grid()
    with torch.no_grad():
        model.head.out.weight.mul_(300)  # 65536 times its gradients are too much for fp16
    wanted = train(model, policy("fp32"), batches, random_state.capture())
    found = train(model, policy("fp16"), batches, random_state.capture(), wanted.choices)
    assert found.scale < 65536 and math.log2(found.scale) == int(math.log2(found.scale))
    errors = gradient_errors(found, wanted, stages_of(model))
    assert all(math.isfinite(error) for error in errors.values())


class Picks(nn.Module):
    """Proposals from a module, as RPN gives them: in 16 bit the best one is another."""

    def __init__(self):
        super().__init__()
        self.proposer = Proposer()
        self.loss = nn.Linear(4, 1)

    def forward(self, batch):
        proposals, extra = self.proposer(batch[0]["x"])
        return {"loss": self.loss(proposals[0].boxes.tensor).mean() ** 2, "loss_extra": extra["loss"]}


class Proposer(nn.Module):
    def forward(self, x):
        values = torch.tensor([1.0, 1.001, 0.5]).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
        best = int(values.argmax())
        boxes = Boxes(torch.eye(4)[best : best + 1] * (best + 1))
        return [Instances((9, 9), boxes=boxes)], {"loss": x.mean() * (1 + best)}


def test_choices_are_held_and_numbers_are_not():
    torch.manual_seed(0)
    model, batch, random = Picks(), [{"x": torch.ones(2)}], random_state.capture()
    wanted = train(model, policy("fp32"), [batch], random)
    free = train(model, policy("bf16"), [batch], random)
    held = train(model, policy("bf16"), [batch], random, wanted.choices)
    assert loss_errors(free, wanted)["loss"] > 0.3 and loss_errors(held, wanted)["loss"] < 0.02
    assert held.losses[0]["loss_extra"] == 1.0 != wanted.losses[0]["loss_extra"]  # the loss of its own choice


def test_choices_in_nested_outputs():
    class Gives(nn.Module):
        def forward(self, value):
            return {"a": [value, (value.long(), None)], "b": value > 1}

    choices, module = Choices(), Gives()
    with choices.recorded(module):
        module(torch.tensor([3.0]))
    with choices.held(module):
        found = module(torch.tensor([0.5]))
        assert module(torch.tensor([0.5]))["b"].item() is False  # a second call that the other run did not make
    assert found["a"][0].item() == 0.5 and found["a"][1][0].item() == 3 and found["a"][1][1] is None and found["b"].item() is True
    assert not module._forward_hooks


def test_errors_of_losses():
    wanted = Training([{"a": 2.0, "b": 1e-6}, {"a": 4.0, "b": 1e-6}], [], [])
    found = Training([{"a": 2.2, "b": 2e-6}, {"a": 4.0, "b": 1e-6}], [], [])
    errors = loss_errors(found, wanted)
    assert errors["a"] == pytest.approx(0.2 / 6) and errors["b"] < 1e-4  # of a loss that is nothing beside the other
    assert loss_errors(wanted, wanted) == {"a": 0.0, "b": 0.0}
    assert loss_errors(Training([{"a": math.nan, "b": 0.0}, {}], [], []), wanted) == {"a": math.inf, "b": math.inf}


def test_errors_of_gradients():
    gradients = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0]), "z": torch.tensor([0.0])}
    wanted = Training([], [gradients], [])
    stages = {"one": ["x"], "two": ["y", "frozen"], "none": ["z"]}
    found = Training([], [{**gradients, "x": torch.tensor([3.0, 4.5])}], [])
    assert gradient_errors(found, wanted, stages) == {"one": pytest.approx(0.1), "two": 0.0}
    assert gradient_errors(Training([], [{}], []), wanted, stages) == {"one": math.inf, "two": math.inf}


def test_stages_have_the_names_of_the_monitor():
    model = grid()[0]
    model.body[0].requires_grad_(False)
    stages = stages_of(model)
    assert sorted(sum(stages.values(), [])) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert set(stages) == {"body", "head"}


def test_what_is_no_result_of_the_precision_is_raised():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, batch):
            raise batch[0]["error"]

    for error in (KeyError("image"), torch.cuda.OutOfMemoryError("full")):
        with pytest.raises(type(error)):
            train(Fails(), policy("bf16"), [[{"error": error}]], random_state.capture(), [Choices()])
    found = train(Fails(), policy("bf16"), [[{"error": RuntimeError("no kernel")}]], random_state.capture(), [Choices()])
    assert found.failure == "RuntimeError: no kernel" and found.losses == [{}] and found.gradients == [{}]
    with pytest.raises(RuntimeError):  # in fp32 it is a fault of the model
        train(Fails(), policy("fp32"), [[{"error": RuntimeError("no kernel")}]], random_state.capture())
