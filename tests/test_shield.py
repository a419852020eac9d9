"""The shield: each operator against fp32 arithmetic on the same 16-bit inputs, and the fp32 path unchanged."""

import copy
import importlib
import inspect
import logging
import pickle

import pytest
import torch
from conftest import TinyModel
from detectron2.layers import FrozenBatchNorm2d, ROIAlign, batched_nms
from detectron2.modeling import build_model
from detectron2.modeling.box_regression import Box2BoxTransformLinear, Box2BoxTransformRotated
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import nn

from d2amp_ext import PrecisionPolicy, _compat, load_cfg
from d2amp_ext.numerics.shield import SHIELD, report_frozen_scales, shield

LOW = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place, relative
needs_compiled = pytest.mark.skipif(not _compat.has_compiled_ops(), reason="this Detectron2 has no compiled module")


def shielded(module):
    holder = nn.Module()
    holder.part = module
    shield(holder)
    return module


@pytest.fixture(params=[False, True], ids=["plain", "autocast"])
def surroundings(request):
    """Outside and inside autocast."""
    return lambda dtype: torch.autocast("cpu", dtype=dtype, enabled=request.param)


def relative(found, exact):
    return ((found.float() - exact).norm() / exact.norm()).item()


# Operators


@pytest.mark.parametrize("dtype", LOW)
def test_roi_align_keeps_coordinates(dtype, surroundings):
    """Found: 5.4 % off in bf16 on noise; 0.17 % is the rounding of the output."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 8, 200, 336, generator=generator).to(dtype)
    boxes = torch.rand(60, 2, generator=generator) * torch.tensor([900.0, 600.0])
    boxes = torch.cat([boxes, boxes + 20 + torch.rand(60, 2, generator=generator) * 300], dim=1)
    rois = torch.cat([(torch.arange(60) % 2)[:, None].float(), boxes], dim=1)
    exact = ROIAlign((7, 7), 0.25, 0)(features.float(), rois)
    ours, stock = shielded(ROIAlign((7, 7), 0.25, 0)), ROIAlign((7, 7), 0.25, 0)
    features.requires_grad_()
    with surroundings(dtype):
        pooled = ours(features, rois)
    assert pooled.dtype == dtype and relative(pooled, exact) <= ROUNDING[dtype] and relative(pooled, exact) <= 0.0025
    with torch.autocast("cpu", dtype=dtype):
        assert relative(stock(features, rois), exact) > 3 * relative(pooled, exact)
    pooled.float().sum().backward()
    assert features.grad.dtype == dtype and torch.isfinite(features.grad).all()


def test_the_centre_of_a_box_on_a_ramp_is_right():
    ramp = torch.arange(1024.0).expand(1, 1, 32, 1024).contiguous()
    rois = torch.tensor([[0, 805.0, 4.0, 837.0, 20.0]])
    pooled = shielded(ROIAlign((1, 1), 1.0, 0))(ramp.bfloat16(), rois)
    exact = ROIAlign((1, 1), 1.0, 0)(ramp.bfloat16().float(), rois)
    assert abs(pooled.item() - exact.item()) <= 2.0  # bf16 has steps of 4 there; the output is rounded once


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_boxes_are_decoded_in_fp32(dtype, normalize, surroundings):
    """Found: FCOS boxes 0.94 px off in the mean."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(2000, 2, generator=generator) * 1000
    anchors = torch.cat([centres - 16, centres + 16], dim=1)
    deltas = torch.rand(2000, 4, generator=generator) * (2 if normalize else 60) + 0.25
    transform = shielded_transform(Box2BoxTransformLinear(normalize))
    with surroundings(dtype):
        boxes = transform.apply_deltas(deltas.to(dtype), anchors)
    exact = Box2BoxTransformLinear(normalize).apply_deltas(deltas.to(dtype).float(), anchors)
    assert torch.equal(boxes, exact)
    off = (Box2BoxTransformLinear(normalize).apply_deltas(deltas.to(dtype), anchors).float() - exact).abs().mean()
    assert off > 0.05
    rounded = (exact - Box2BoxTransformLinear(normalize).apply_deltas(deltas, anchors)).abs().mean()
    assert rounded <= 0.1  # what is left is the rounding of the network's output


def shielded_transform(transform):
    holder = nn.Module()
    holder.box2box_transform = transform
    assert shield(holder)[0] == {type(transform).__name__: 1}
    return transform


@pytest.mark.parametrize("dtype", LOW)
def test_rotated_boxes_are_decoded_in_fp32(dtype, surroundings):
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(100, 5, generator=generator) * 500 + 10
    deltas = torch.randn(100, 5, generator=generator)
    weights = (10.0, 10.0, 5.0, 5.0, 1.0)
    with surroundings(dtype):
        found = shielded_transform(Box2BoxTransformRotated(weights)).apply_deltas(deltas.to(dtype), boxes)
    assert torch.equal(found, Box2BoxTransformRotated(weights).apply_deltas(deltas.to(dtype).float(), boxes))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", LOW)
def test_frozen_batch_norm_is_rounded_once(dtype, grad, surroundings):
    generator = torch.Generator().manual_seed(0)
    norm = FrozenBatchNorm2d(16)
    for name, value in (("weight", 2.0), ("bias", 3.0), ("running_mean", 5.0), ("running_var", 1.0)):
        getattr(norm, name).copy_(torch.rand(16, generator=generator) * value + 0.01)
    ours = shielded(copy.deepcopy(norm))
    x = (torch.randn(2, 16, 20, 20, generator=generator) * 4).to(dtype)
    fp32 = x.float().requires_grad_()
    exact = norm(fp32)
    x.requires_grad_(grad)
    with surroundings(dtype):
        found = ours(x)
    assert found.dtype == dtype and torch.equal(found, exact.to(dtype))
    if grad:
        out = torch.randn(exact.shape, generator=generator).to(dtype)
        found.backward(out)
        exact.backward(out.float())
        assert torch.equal(x.grad, fp32.grad.to(dtype))
        assert relative(norm(x.detach().requires_grad_()), exact.detach()) > 1.2 * relative(found.detach(), exact.detach())


def test_a_tiny_running_variance_overflows_no_more_in_fp16():
    norm = FrozenBatchNorm2d(4, eps=1e-12)
    norm.running_var.fill_(1e-10)
    x = torch.full((1, 4, 2, 2), 1e-3).half().requires_grad_()
    assert not torch.isfinite(norm(x)).all()
    assert torch.isfinite(shielded(norm)(x)).all()


def test_a_folded_scale_that_is_not_finite_is_named(caplog):
    model = nn.Sequential(FrozenBatchNorm2d(4), nn.Sequential(FrozenBatchNorm2d(4)))
    assert report_frozen_scales(model) == []
    model[1][0].running_var.fill_(-1)
    with caplog.at_level(logging.WARNING):
        assert report_frozen_scales(model) == ["1.0"]
    assert "1.0" in caplog.text and "MODEL.WEIGHTS" in caplog.text


# Whole heads, in real models


@pytest.fixture(scope="module")
def micro():
    cfg = load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu", "MODEL.MASK_ON", "True", "MODEL.KEYPOINT_ON", "True",
                   "MODEL.ROI_HEADS.NUM_CLASSES", "1", "MODEL.ROI_MASK_HEAD.NUM_CONV", "1", "MODEL.ROI_MASK_HEAD.CONV_DIM", "8",
                   "MODEL.ROI_MASK_HEAD.NAME", "MaskRCNNConvUpsampleHead", "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", "(8,)",
                   "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "3"])  # fmt: skip
    torch.manual_seed(0)
    return build_model(cfg).eval()


@pytest.mark.parametrize("dtype", LOW)
def test_final_scores_masks_and_keypoints_are_fp32(micro, dtype):
    model = copy.deepcopy(micro)
    counts, left_alone = shield(model)
    assert counts["FastRCNNOutputLayers"] == counts["RPN"] == counts["MaskRCNNConvUpsampleHead"] == 1 and not left_alone
    assert counts["ROIAlign"] >= 3 and counts["KRCNNConvDeconvUpsampleHead"] == 1
    predictor = model.roi_heads.box_predictor
    logits = torch.cat([torch.linspace(2, 6, 1000)[:, None], torch.zeros(1000, 1)], dim=1)
    proposals = [Instances((64, 64), proposal_boxes=Boxes(torch.rand(1000, 4) * 20))]
    with torch.autocast("cpu", dtype=dtype):
        (scores,) = predictor.predict_probs((logits.to(dtype), torch.zeros(1000, 4, dtype=dtype)), proposals)
    assert scores.dtype == torch.float32
    assert len(scores[:, 0].unique()) == len(logits[:, 0].to(dtype).unique())  # no tie that the logits do not have
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        assert model.roi_heads.mask_head.layers(torch.randn(2, 32, 14, 14)).dtype == torch.float32
        assert model.roi_heads.keypoint_head.layers(torch.randn(2, 32, 14, 14)).dtype == torch.float32
        assert micro.roi_heads.mask_head.layers(torch.randn(2, 32, 14, 14)).dtype == dtype


def test_a_thousand_distinct_logits_keep_distinct_scores(micro):
    """Found: 129 distinct values in bf16."""
    model = copy.deepcopy(micro)
    shield(model)
    logits = torch.cat([torch.linspace(0, 3, 1000)[:, None], torch.zeros(1000, 1)], dim=1)
    proposals = [Instances((64, 64), proposal_boxes=Boxes(torch.rand(1000, 4) * 20))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (scores,) = model.roi_heads.box_predictor.predict_probs((logits, torch.zeros(1000, 4)), proposals)
    assert len(scores[:, 0].unique()) == 1000


@pytest.mark.parametrize("dtype", LOW)
def test_nms_takes_16_bit_scores(micro, dtype):
    """Found: "dets should have the same type as scores" outside autocast."""
    boxes = torch.rand(40, 4) * 20
    boxes[:, 2:] += boxes[:, :2] + 1
    scores = torch.rand(40, 2).to(dtype)
    with pytest.raises(RuntimeError):
        batched_nms(boxes, scores[:, 0], torch.zeros(40), 0.5)
    model = copy.deepcopy(micro)
    shield(model)
    proposals = [Instances((64, 64), proposal_boxes=Boxes(boxes))]
    results, _ = model.roi_heads.box_predictor.inference((scores, torch.zeros(40, 4, dtype=dtype)), proposals)
    exact, _ = micro.roi_heads.box_predictor.inference((scores.float(), torch.zeros(40, 4)), proposals)
    assert torch.equal(results[0].scores, exact[0].scores)
    assert torch.equal(results[0].pred_boxes.tensor, exact[0].pred_boxes.tensor)


def test_the_fp32_path_is_the_same_bit_for_bit(micro):
    micro = copy.deepcopy(micro)
    micro.roi_heads.keypoint_on = False  # Detectron2 asserts when an untrained head finds nothing
    model = copy.deepcopy(micro)
    shield(model)
    image = {"image": (torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(3)) * 255), "height": 48, "width": 64}
    with torch.no_grad():
        ours, stock = model([image])[0]["instances"], micro([image])[0]["instances"]
    for name, value in stock.get_fields().items():
        found = ours.get(name)
        assert torch.equal(getattr(found, "tensor", found), getattr(value, "tensor", value)), name
    target = Instances((48, 64), gt_boxes=Boxes(torch.tensor([[5.0, 5, 30, 30]])), gt_classes=torch.zeros(1).long())
    losses = []
    for module in (model, micro):
        module = copy.deepcopy(module).train()
        module.roi_heads.mask_on = False
        torch.manual_seed(0)
        with EventStorage():
            found = module([{**image, "instances": target}])
        sum(found.values()).backward()
        losses.append([*map(float, found.values()), *(float(p.grad.sum()) for p in module.parameters() if p.grad is not None)])
    assert losses[0] == losses[1]


def small_fcos(backbone):
    from detectron2.layers import ShapeSpec
    from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
    from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead

    names = ["p2", "p3", "p4", "p5"]
    head = FCOSHead(input_shape=[ShapeSpec(channels=32)] * 4, num_classes=2, conv_dims=[16], norm="BN")
    anchors = DefaultAnchorGenerator(sizes=[[s] for s in (4, 8, 16, 32)], aspect_ratios=[1.0], strides=[4, 8, 16, 32], offset=0.5)
    options = {"anchor_generator": anchors} if "anchor_generator" in inspect.signature(FCOS.__init__).parameters else {}
    return FCOS(backbone=backbone, head=head, head_in_features=names, num_classes=2, pixel_mean=[0.0] * 3,
                pixel_std=[1.0] * 3, **options)  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
def test_fcos_trains_and_detects_in_16_bit(micro, dtype):
    """Found: "Index put requires the source and destination dtypes match" in its GIoU loss."""
    torch.manual_seed(0)
    model = small_fcos(copy.deepcopy(micro.backbone)).train()
    stock = copy.deepcopy(model)
    assert shield(model)[0]["FCOS"] == 1 and shield(model)[0]["Box2BoxTransformLinear"] == 1
    boxes = Boxes(torch.tensor([[4.0, 4, 40, 40], [30.0, 10, 62, 44]]))
    batch = [{"image": torch.rand(3, 48, 64) * 255, "instances": Instances((48, 64), gt_boxes=boxes, gt_classes=torch.tensor([0, 1]))}]

    def losses(module, enabled=True):
        with EventStorage(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            found = module(batch)
        return {name: float(value) for name, value in found.items()}, sum(found.values())

    exact, _ = losses(copy.deepcopy(stock), enabled=False)
    if dtype == torch.bfloat16:
        with pytest.raises(RuntimeError):
            losses(stock)
    found, total = losses(model)
    total.backward()
    assert found == pytest.approx(exact, rel=0.05)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        instances = model([{"image": batch[0]["image"], "height": 48, "width": 64}])[0]["instances"]
    assert instances.scores.dtype == instances.pred_boxes.tensor.dtype == torch.float32


# The table


def test_every_row_names_what_there_is():
    """A class or a method that Detectron2 renames comes to light here."""
    for path, methods in SHIELD.items():
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        if "DeformConv" not in name or _compat.has_compiled_ops():  # Detectron2 has a dummy in its place
            assert all(callable(getattr(cls, method, None)) for method in methods), path


def test_a_subclass_is_left_alone_and_named():
    class MyAlign(ROIAlign):
        pass

    model = nn.Sequential(MyAlign((1, 1), 1.0, 0), ROIAlign((1, 1), 1.0, 0))
    counts, left_alone = shield(model)
    assert counts == {"ROIAlign": 1} and left_alone == ("0 (MyAlign, a ROIAlign)",) and type(model[0]) is MyAlign


def test_matchers_and_criteria_of_other_projects_are_known_by_name():
    class HungarianMatcher(nn.Module):
        def forward(self, outputs, targets):
            probabilities = outputs["logits"].sigmoid()
            return (-(1 - probabilities + 1e-8).log()).sum() + targets.sum()

    model = nn.Sequential(HungarianMatcher())
    outputs = {"logits": torch.full((4,), 20.0).half()}
    assert not torch.isfinite(model[0](outputs, torch.zeros(1)))  # 1e-8 is 0 in fp16, and so is the probability
    assert shield(model)[0] == {"HungarianMatcher": 1}
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.isfinite(model[0](outputs, torch.zeros(1)))


def test_twice_is_once_and_copies_keep_it(micro):
    model = copy.deepcopy(micro)
    counts = shield(model)
    classes = [type(module) for module in model.modules()]
    assert shield(model) == counts and [type(module) for module in model.modules()] == classes
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in copied.modules()] == classes
    assert [name for name, _ in model.named_modules()] == [name for name, _ in micro.named_modules()]
    assert str(model) == str(micro) and model.state_dict().keys() == micro.state_dict().keys()


def test_off_and_fp32_put_nothing_on(micro):
    from d2amp_ext.numerics.protect import protect

    for policy in (PrecisionPolicy("off"), PrecisionPolicy("fp32"), PrecisionPolicy("tf32"), PrecisionPolicy("bf16", shield=False)):
        model = copy.deepcopy(micro)
        assert protect(model, policy.resolve("cpu")).shielded == {}
        assert [type(module) for module in model.modules()] == [type(module) for module in micro.modules()]


def test_rotated_boxes_without_the_compiled_module_are_one_clear_error(monkeypatch):
    from d2amp_ext import UserError
    from d2amp_ext.numerics.protect import check_operators

    class RRPN(nn.Module):
        pass

    monkeypatch.setattr(_compat, "has_compiled_ops", lambda: False)
    with pytest.raises(UserError, match=r"0: RRPN.*detectron2\._C.*d2amp setup"):
        check_operators(nn.Sequential(RRPN()))
    check_operators(TinyModel())


# With the compiled module


@needs_compiled
@pytest.mark.parametrize("dtype", LOW)
def test_rotated_operators(dtype, surroundings):
    from detectron2.layers import ROIAlignRotated

    features = torch.randn(1, 4, 50, 50).to(dtype)
    rois = torch.tensor([[0, 101.3, 90.7, 60.0, 30.0, 25.0]])
    exact = ROIAlignRotated((5, 5), 0.25, 0)(features.float(), rois)
    with surroundings(dtype):
        found = shielded(ROIAlignRotated((5, 5), 0.25, 0))(features, rois)
    assert torch.equal(found, exact.to(dtype))


@needs_compiled
@pytest.mark.parametrize("dtype", LOW)
def test_deformable_convolution(dtype, surroundings):
    from detectron2.layers import DeformConv

    torch.manual_seed(0)
    layer = DeformConv(4, 6, 3, padding=1)
    x, offset = torch.randn(1, 4, 12, 12).to(dtype), torch.randn(1, 18, 12, 12).to(dtype)
    exact = layer(x.float(), offset.float())
    with surroundings(dtype):
        found = shielded(copy.deepcopy(layer))(x, offset)
    assert torch.equal(found, exact.to(dtype))


@needs_compiled
@pytest.mark.parametrize("dtype", LOW)
def test_a_rotated_model_detects_in_16_bit(dtype):
    cfg = load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu", "MODEL.PROPOSAL_GENERATOR.NAME", "RRPN",
                   "MODEL.ANCHOR_GENERATOR.NAME", "RotatedAnchorGenerator", "MODEL.ANCHOR_GENERATOR.ANGLES", "[[0, 45]]",
                   "MODEL.RPN.BBOX_REG_WEIGHTS", "(1, 1, 1, 1, 1)", "MODEL.ROI_HEADS.NAME", "RROIHeads",
                   "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignRotated", "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS",
                   "(10, 10, 5, 5, 1)"])  # fmt: skip
    model = build_model(cfg).eval()
    stock = copy.deepcopy(model)
    shield(model)
    image = [{"image": torch.rand(3, 48, 64) * 255}]
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        instances = model(image)[0]["instances"]
        assert instances.pred_boxes.tensor.dtype == instances.scores.dtype == torch.float32
        with pytest.raises(RuntimeError):
            stock(image)
