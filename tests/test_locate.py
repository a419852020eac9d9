"""The locator: planted faults are found by name, and a replay leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2amp_ext import PrecisionPolicy
from d2amp_ext.numerics.locate import bad_inputs, bad_parameters, locate
from d2amp_ext.numerics.watch import extent
from d2amp_ext import random_state

PRECISIONS = ["fp32", "bf16", "fp16"]


def policy(precision):
    return PrecisionPolicy(precision).resolve("cpu")


class Root(nn.Module):
    """sqrt at 0: the value is finite, the gradient is not."""

    def forward(self, x):
        return x.sqrt()


class Staged(TinyModel):
    """Parts in which faults can be planted, with batch norm, dropout and things that a forward pass changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
        self.root = Root()
        self.fault = ""
        self.seen, self.history = 0, [5]
        self.average = torch.ones(())

    def forward(self, batch):
        x = torch.cat([sample["x"] for sample in batch])
        self.seen += 1
        self.history.append(self.seen)
        self.average = self.average * 0.9 + 0.1
        get_event_storage().put_scalar("seen", self.seen)
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        if self.fault == "raise":
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        if self.fault == "own code":
            hidden = hidden.float() / torch.zeros(16)
        if self.fault == "checkpoint":
            hidden = checkpoint(lambda value: self.root(self.head[0](value) * 0), hidden, use_reentrant=False)
        y = self.head(hidden).float()
        losses = {"loss_a": y.pow(2).mean(), "loss_b": self.second(hidden).float().abs().mean()}
        if self.fault == "divides":
            losses["loss_b"] = losses["loss_b"] / (y * 0).sum()
        if self.fault == "root":
            losses["loss_b"] = self.root(y * 0).sum()
        return losses


def plant(fault):
    torch.manual_seed(0)
    model, data = Staged(), tiny_data(3)
    model.fault = fault
    with torch.no_grad():
        if fault == "overflow":
            model.head[2].weight[1, 3] = 1e5  # fp16 has no such number
        if fault == "parameter":
            model.head[0].bias[2] = float("nan")
        if fault == "statistics":
            model.norm.running_mean[1] = float("inf")
    if fault == "pixel":
        data[1][0]["x"][2, 3] = float("nan")
    return model, data


def test_a_healthy_window_has_nothing():
    for precision in PRECISIONS:
        finding = locate(*plant(""), policy(precision), scale=16.0)
        assert not finding.found and "everything was finite" in finding.describe().lower() and finding.advice == ""
        assert set(finding.losses) == {"loss_a", "loss_b"} and finding.micro_batch == 0


def test_a_layer_whose_weights_overflow_fp16():
    finding = locate(*plant("overflow"), policy("fp16"))
    place = finding.forward
    assert (place.module, place.cls, place.dtype, place.came_in) == ("head.2", "Linear", "float16", False)
    assert place.weight == pytest.approx(1e5) and 0 < place.largest < 100
    assert finding.terms == ("loss_a",) and finding.micro_batch == 1 and finding.backward is None
    assert "head.2 (Linear)" in finding.describe() and "FP32_MODULES" in finding.advice and "head.2" in finding.advice
    for precision in ("fp32", "bf16"):
        assert not locate(*plant("overflow"), policy(precision)).found


def test_a_module_that_stays_in_fp32_is_no_longer_found():
    from d2amp_ext.numerics.protect import protect

    model, data = plant("overflow")
    protect(model, PrecisionPolicy("fp16", fp32_modules=("head.2",)).resolve("cpu"))
    assert locate(model, data, policy("fp16")).forward is None  # the gradient overflows, as it is that large


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_parameter(precision):
    finding = locate(*plant("parameter"), policy(precision))
    assert finding.parameters == ("head.0.bias",) and finding.forward.module == "head.0"
    assert "head.0.bias" in finding.describe() and "weights are damaged" in finding.advice


def test_statistics_that_are_not_finite():
    assert locate(*plant("statistics"), policy("fp32")).parameters == ("norm.running_mean",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_pixel(precision):
    finding = locate(*plant("pixel"), policy(precision))
    assert finding.inputs == ("image_1.png: x",) and finding.micro_batch == 2
    assert finding.forward.module == "first" and finding.forward.came_in
    assert "image_1.png: x" in finding.describe() and "images" in finding.advice


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loss_term_that_divides_by_zero(precision):
    finding = locate(*plant("divides"), policy(precision))
    assert finding.terms == ("loss_b",) and (finding.forward.module, finding.forward.cls) == ("", "Staged")
    assert finding.forward.kind in ("infinite", "NaN") and "loss_b" in finding.advice
    assert finding.losses["loss_b"] == float("inf") and finding.as_dict()["losses"]["loss_b"] == "inf"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_overflows_only_in_backward(precision):
    finding = locate(*plant("root"), policy(precision), scale=4.0)
    place = finding.backward
    assert (place.module, place.cls, place.op) == ("root", "Root", "SqrtBackward0") and finding.forward is None
    assert finding.terms == ("loss_b",) and place.dtype == "float32" and place.before == "" and place.largest == pytest.approx(4 / 3)
    assert all(np.isfinite(value) for value in finding.losses.values())


def test_a_scale_that_is_too_large_for_fp16():
    model, data = plant("")
    finding = locate(model, data, policy("fp16"), scale=2.0**22)
    assert finding.backward.dtype == "float16" and finding.backward.kind == "infinite" and "loss_a" in finding.terms
    assert finding.backward.before == "second" and "goes back to second" in finding.describe()  # of the model's own .float()
    assert "['second']" in finding.advice
    assert not locate(model, data, policy("bf16"), scale=2.0**22).found


def test_values_that_the_code_between_two_modules_spoils():
    place = locate(*plant("own code"), policy("fp32")).forward
    assert (place.module, place.before) == ("", "head") and "hands to head" in place.describe()


def test_a_forward_that_raises():
    finding = locate(*plant("raise"), policy("bf16"))
    assert "Inf/NaN" in finding.failure and finding.losses == {} and finding.forward.cls == "Staged"
    assert "raised: Predicted boxes" in finding.describe()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing(precision):
    finding = locate(*plant("checkpoint"), policy(precision))
    assert finding.backward is not None and finding.backward.module == "root"


def test_other_errors_of_the_model_are_passed_on_and_leave_nothing_behind():
    model, data = plant("")
    before = state(model)
    with pytest.raises(KeyError):
        locate(model, [data[0], [{"y": 1}]], policy("fp32"))
    assert same(before, state(model))


def state(model):
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values["gradients"] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    values["history"] = list(model.history)
    values["seen"], values["average"], values["training"] = model.seen, model.average.clone(), [m.training for m in model.modules()]
    values["hooks"] = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    values["random"] = random_state.capture()
    return values


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("fault", ["", "overflow", "parameter", "pixel", "divides", "root", "raise", "own code"])
def test_a_replay_leaves_nothing_behind(fault):
    model, data = plant(fault)
    model.norm.eval()
    model.head[2].requires_grad_(False)
    for parameter in model.second.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before, parameters = state(model), list(model.parameters())
    given = [parameter.grad for parameter in parameters]
    with EventStorage(5) as storage:
        locate(model, data, policy("fp16"), random={**random_state.capture(), "torch": torch.Generator().get_state()})
        assert get_event_storage() is storage and storage.histories() == {} and storage.iter == 5
    assert same(before, state(model))
    assert all(a is b and a.grad is g for a, b, g in zip(model.parameters(), parameters, given))


def test_a_replay_starts_from_the_random_state():
    model, data = plant("")
    start = random_state.capture()
    first = locate(model, data, policy("fp32"), random=start).losses
    torch.manual_seed(99)
    assert locate(model, data, policy("fp32"), random=start).losses == first
    assert locate(model, data, policy("fp32")).losses != first


def test_tied_weights_stay_tied():
    class Tied(TinyModel):
        def forward(self, batch):
            assert self.first.weight is self.again.weight
            return super().forward(batch)

    model = Tied()
    model.again = nn.Linear(8, 16)
    model.again.weight = model.first.weight
    assert not locate(model, tiny_data(1), policy("fp32")).found and model.again.weight is model.first.weight


def test_inputs_of_every_kind():
    instances = Instances((10, 10))
    instances.gt_boxes = Boxes(torch.tensor([[0.0, 0, 5, float("inf")]]))
    instances.gt_masks = PolygonMasks([[np.array([0.0, 0, 5, 5, 0, float("nan")])]])
    bits = Instances((4, 4), gt_masks=BitMasks(torch.ones(1, 4, 4)), gt_classes=torch.tensor([1]))
    batch = [
        {"image": torch.zeros(3, 4, 4, dtype=torch.uint8), "file_name": "fine.png", "height": 4, "instances": bits},
        {"image": torch.zeros(3, 4, 4), "file_name": "bad.png", "instances": instances},
        {"image": torch.full((3, 2, 2), float("nan")), "weight": float("inf"), "nested": {"scores": [np.float32("nan")]}},
    ]
    assert bad_inputs([[], batch]) == (
        "bad.png: instances.gt_boxes", "bad.png: instances.gt_masks[0][0]", "sample 3 of micro-batch 2: image",
        "sample 3 of micro-batch 2: weight", "sample 3 of micro-batch 2: nested.scores[0]",
    )  # fmt: skip
    assert bad_inputs([torch.tensor([float("nan")])]) == ("sample 1 of micro-batch 1",)


def test_extents():
    low, inf, nan = torch.tensor([-3.0, 2.0]), float("inf"), float("nan")
    assert extent([low, torch.tensor([9])]).largest == 3.0 and extent([]).kind is None
    assert extent(torch.tensor([1.0, -inf])).kind == "-infinite" and extent(torch.tensor([inf, -inf])).kind == "infinite"
    found = extent({"a": low.half(), "b": (torch.tensor([nan, inf, 5.0], dtype=torch.bfloat16), None)})
    assert (found.kind, found.largest, found.dtype) == ("NaN", 5.0, "bfloat16")
    assert extent(torch.tensor([nan])).largest == 0.0 and extent(torch.empty(0)).kind is None
    assert extent(torch.tensor([complex(0, inf)])).kind == "infinite"
    assert extent(torch.sparse_coo_tensor([[1]], [nan], (3,))).kind == "NaN"


def test_masks_of_minus_infinity_are_no_fault():
    class Masked(TinyModel):
        def __init__(self):
            super().__init__()
            self.soft = nn.Softmax(dim=-1)

        def forward(self, batch):
            losses = super().forward(batch)
            scores = torch.cat([sample["x"] for sample in batch]).masked_fill(torch.eye(4, 8, dtype=torch.bool), -float("inf"))
            losses["loss_c"] = self.soft(scores).sum() + self.first(self.soft(scores)).sum() / 0
            return losses

    assert locate(Masked(), tiny_data(1), policy("fp32")).forward.module == ""


def test_bad_parameters_are_named_without_wrappers():
    model = TinyModel()
    wrapped = nn.Module()
    wrapped._orig_mod = model
    with torch.no_grad():
        model.first.weight[0, 0] = float("inf")
    assert bad_parameters(wrapped) == ("first.weight",)


@pytest.mark.parametrize("architecture", ["retinanet", "mask_rcnn"])
def test_models_of_detectron2(architecture, datasets_dir, monkeypatch):
    from detectron2.data import build_detection_train_loader
    from detectron2.modeling import build_model

    from d2amp_ext import load_cfg
    from d2amp_ext.data.register import register_datasets

    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    cfg = load_cfg(f"quick/{architecture}_micro.yaml", ["MODEL.DEVICE", "cpu"])
    register_datasets(cfg)
    torch.manual_seed(0)
    model = build_model(cfg)
    batch = next(iter(build_detection_train_loader(cfg)))
    before = {name: value for name, value in vars(model).items() if isinstance(value, (int, float, torch.Tensor))}
    random_now = random_state.capture()
    assert not locate(model, [batch], policy("fp32"), random=random_now).found
    assert same(before, {name: vars(model)[name] for name in before})
    name = {"retinanet": "head.cls_score", "mask_rcnn": "roi_heads.mask_head.deconv"}[architecture]
    with torch.no_grad():
        model.get_submodule(name).weight.view(-1)[0] = float("nan")
    finding = locate(model, [batch], policy("fp32"), random=random_now)
    assert finding.forward.module == name and finding.parameters == (f"{name}.weight",)
