"""fp32 islands: what is cast, what is left, and that nothing changes without 16 bit."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from detectron2.structures import Boxes, ImageList, Instances
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2amp_ext.numerics.island import (
    active_autocast, clean_name, fp32_island, has_low, island_class, stock_class, upcast,
)  # fmt: skip

LOW = [torch.bfloat16, torch.float16]


class Picky(nn.Module):
    """A stand-in for an operator that has kernels for fp32 alone."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.seen = []

    def forward(self, x, scale=None):
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        if x.dtype != torch.float32 or (scale is not None and scale.dtype != torch.float32):
            raise RuntimeError(f'"picky" not implemented for {x.dtype}')
        y = x @ self.weight
        return y if scale is None else y * scale


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("dtype", LOW)
def test_every_container_is_cast_into_a_new_one(dtype):
    low = torch.ones(2, 4, dtype=dtype)
    fields = Instances((4, 4), scores=torch.ones(2, dtype=dtype), boxes=Boxes(torch.ones(2, 4)), classes=torch.ones(2).long())
    fields.boxes.tensor = low
    value = {"list": [low, "text", 3], "tuple": (low, None), "pair": Pair(low, 1), "instances": fields,
             "images": ImageList(torch.ones(1, 3, 4, 4, dtype=dtype), [(4, 4)]), "boxes": Boxes(low), "same": [torch.ones(1)]}  # fmt: skip
    value["boxes"].tensor = low
    cast = upcast(value)
    assert not has_low(cast) and has_low(value)
    assert fields.scores.dtype == dtype and value["list"][0].dtype == dtype  # the caller's own stay
    assert type(cast["pair"]) is Pair and cast["list"][1:] == ["text", 3] and cast["same"] is value["same"]
    assert cast["instances"].classes.dtype == torch.int64 and cast["images"].image_sizes == [(4, 4)]
    assert upcast(torch.ones(1).double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", LOW)
def test_a_function_runs_in_fp32_and_gradients_come_back_in_16_bit(dtype):
    seen = []

    @fp32_island
    def cost(x, *, weights):
        """Doc."""
        seen.append((x.dtype, weights[0].dtype, torch.is_autocast_enabled("cpu")))
        return (x * weights[0]).sum()

    x = torch.ones(3, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        assert active_autocast(x) == "cpu"
        result = cost(x, weights=[torch.ones(3, dtype=dtype)])
        assert torch.is_autocast_enabled("cpu")
    result.backward()
    assert seen == [(torch.float32, torch.float32, False)] and result.dtype == torch.float32
    assert x.grad.dtype == dtype and cost.__name__ == "cost" and cost.__doc__ == "Doc."


def test_without_16_bit_the_very_arguments_arrive():
    given = [torch.ones(2), {"a": 1}]
    assert fp32_island(lambda value: value)(given) is given


def test_a_class_and_a_method():
    picky = fp32_island(type("Other", (Picky,), {}))()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert picky(torch.ones(2, 4).bfloat16()).dtype == torch.float32

    class Head(nn.Module):
        @fp32_island
        def losses(self, x):
            return x.dtype

    assert Head().losses(torch.ones(1).half()) == torch.float32


def test_an_error_leaves_autocast_as_it_was():
    @fp32_island
    def fail(x):
        raise KeyError("mine")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyError, match="mine"):
            fail(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


def test_an_island_class_passes_for_its_base():
    module = Picky()
    module.__class__ = island_class(Picky)
    assert island_class(Picky) is type(module) and isinstance(module, Picky) and stock_class(module) is Picky
    assert type(module).__qualname__ == "Picky" and type(module).__module__ == Picky.__module__
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for copied in copies:
        assert type(copied) is type(module) and torch.equal(copied.weight, module.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            copied(torch.ones(2, 4).bfloat16(), scale=torch.ones(1).bfloat16())
        assert copied.seen == [(torch.float32, False)] and module.seen == []
    assert list(module.state_dict()) == ["weight"]


def test_under_activation_checkpointing_the_second_forward_is_an_island_too():
    module = Picky()
    module.__class__ = island_class(Picky)
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(lambda value: module(value.bfloat16()).sum(), x, use_reentrant=False)
    y.backward()
    assert module.seen == [(torch.float32, False)] * 2 and torch.equal(x.grad, torch.ones(2, 4))


def test_names_without_wrappers():
    assert clean_name("a._checkpoint_wrapped_module.b._orig_mod") == "a.b"
