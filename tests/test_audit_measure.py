"""The Auditor: errors and limits; and the proposal, which has tried what it says."""

import copy
import dataclasses
import math

import pytest
import torch
from audit_models import grid, policy
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from test_shield import small_fcos
from torch import nn

from d2amp_ext import UserError, load_cfg, random_state
from d2amp_ext.audit.limits import FACTORS, ap_figures, worst
from d2amp_ext.audit.measure import Auditor
from d2amp_ext.audit.propose import propose


def auditor(fault, precision, images=True, tolerance=0.02, **options):
    model, batches, pictures = grid(fault)
    return Auditor(model, policy(precision, **options), batches, pictures if images else (), tolerance=tolerance)


def kinds(measured):
    return {figure.kind for figure in measured.figures if figure.excess > 1}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_healthy_model_is_fine(precision):
    measured = auditor("", precision).measure()
    assert 0 < measured.excess < 1 and kinds(measured) == set() and measured.failure == ""
    assert set(measured.losses) == {"loss_cls", "loss_box"} and measured.detections.matched == 4 * 64
    assert {figure.kind for figure in measured.figures} == {"loss", "gradient", "box", "score", "detections"}
    assert all(0 < error < 0.02 for *_, error in measured.losses.values())
    assert measured.scale == (1.0 if precision == "bf16" else 65536.0)
    assert {figure.name for figure in measured.figures if figure.kind == "gradient"} == set(measured.gradients)


def test_a_policy_of_fp32_has_no_error_at_all():
    measured = auditor("", "fp32").measure()
    assert measured.excess == 0 and all(low == high for low, high, _ in measured.losses.values())


@pytest.mark.parametrize("fault, precision, above, modules", [
    ("cancels", "bf16", {"loss", "gradient", "box"}, ("body.4",)),
    ("overflows", "fp16", {"loss", "gradient", "detections"}, ("body.3",)),
    ("decodes", "bf16", {"box"}, ("head",)),
])  # fmt: skip
def test_a_planted_fault_is_above_its_limit_and_the_proposal_mends_it(fault, precision, above, modules):
    audit = auditor(fault, precision)
    first = audit.measure()
    assert above <= kinds(first)
    proposal = propose(audit, first)
    assert proposal.modules == modules and proposal.measurement.excess <= 1 and not proposal.shield
    assert proposal.measurement.policy.fp32_modules == modules
    again = auditor(fault, precision, fp32_modules=modules).measure()  # a user who takes the advice
    assert again.excess == proposal.measurement.excess and kinds(again) == set()


def test_two_faults_need_two_modules_and_none_besides():
    model, batches, images = grid("cancels")
    model.head.decodes_low = True
    audit = Auditor(model, policy("bf16"), batches, images)
    proposal = propose(audit, audit.measure())
    assert sorted(proposal.modules) == ["body.4", "head"] and proposal.measurement.excess <= 1


def test_modules_of_the_config_stay_in_the_proposal():
    audit = auditor("cancels", "bf16", fp32_modules=("head",))
    assert propose(audit, audit.measure()).measurement.policy.fp32_modules == ("head", "body.4")


def test_where_rounding_is_everywhere_whole_parts_are_tried_and_then_nothing_is_proposed():
    audit = auditor("", "bf16", tolerance=1e-4)
    first = audit.measure()
    assert first.excess > 1
    proposal = propose(audit, first)
    assert proposal.trials <= 16 and proposal.best.excess <= first.excess
    if proposal.measurement:
        assert set(proposal.modules) <= {"body", "head"}
    tiny = auditor("", "bf16", tolerance=1e-9)
    assert propose(tiny, tiny.measure()).measurement is None or set(propose(tiny, tiny.measure()).modules) == {"body", "head"}


@pytest.fixture(scope="module")
def fcos():
    """FCOS without the shield cannot be trained in bf16, and decodes its boxes there."""
    torch.manual_seed(0)
    model = small_fcos(build_model(load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu"])).backbone)
    boxes = Boxes(torch.tensor([[4.0, 4, 40, 40], [30.0, 10, 62, 44]]))
    truth = Instances((48, 64), gt_boxes=boxes, gt_classes=torch.tensor([0, 1]))
    batch = [{"image": torch.rand(3, 48, 64) * 255, "instances": truth}]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # statistics of the one batch, or a model that was never trained explodes
    with EventStorage(), torch.no_grad():
        model(batch)
    return model, [batch], [{"image": batch[0]["image"]}]


def test_without_the_shield_what_it_would_mend_comes_first_and_it_is_tried_first(fcos):
    audit = Auditor(fcos[0], policy("bf16", shield=False), *fcos[1:], tolerance=0.2)
    first = audit.measure()
    assert first.failure.startswith("RuntimeError: Index put") and first.excess == math.inf
    in_training, in_evaluation = (audit.ranking(first.policy, training)[0] for training in (True, False))
    assert (in_training.label, in_training.cls, in_training.error) == ("losses", "FCOS", math.inf)
    assert in_evaluation.label == "box2box_transform.apply_deltas" and in_evaluation.error > 0.01
    proposal = propose(audit, first)
    assert proposal.shield and proposal.modules == () and proposal.trials == 1 and proposal.measurement.failure == ""


def test_everything_is_as_before():
    model, batches, images = grid("overflows")
    state, random = copy.deepcopy(model.state_dict()), random_state.capture()
    modes = [module.training for module in model.modules()]
    audit = Auditor(model, policy("fp16"), batches, images)
    propose(audit, audit.measure())
    for before, now in ((state, model.state_dict()), (state, audit.reference.state_dict())):
        assert all(torch.equal(before[name], value) for name, value in now.items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random["torch"], random_state.capture()["torch"])
    assert all(type(module).__module__ != "d2amp_ext" and not hasattr(type(module), "is_island") for module in model.modules())


def test_a_measurement_is_the_same_every_time():
    one, other = (auditor("", "bf16").measure() for _ in range(2))
    assert one.losses == other.losses and one.gradients == other.gradients and one.detections == other.detections


def test_a_model_that_fails_in_fp32_is_a_mistake():
    model, batches, images = grid()
    nn.init.constant_(model.head.out.weight, math.nan)
    with pytest.raises(UserError, match="In fp32 the losses.*head.out.weight"):
        Auditor(model, policy("bf16"), batches, images)


def test_without_images_there_are_no_detections():
    measured = auditor("", "bf16", images=False).measure()
    assert measured.detections is None and {figure.kind for figure in measured.figures} == {"loss", "gradient"}


def test_limits_follow_from_the_tolerance():
    for tolerance in (0.02, 0.1):
        for figure in auditor("", "bf16", tolerance=tolerance).measure().figures:
            expected = FACTORS[figure.kind] * tolerance
            assert figure.limit >= expected if figure.kind == "gradient" else figure.limit == pytest.approx(expected)


def test_the_difference_of_results():
    wanted = {"bbox/AP": 40.0, "bbox/AP50": 60.0, "segm/AP": math.nan, "set/sem_seg/mIoU": 50.0}
    figures = ap_figures({"bbox/AP": 38.5, "set/sem_seg/mIoU": 50.2, "segm/AP": math.nan}, wanted, 0.02)
    assert [(figure.name, round(figure.value, 6), figure.limit) for figure in figures] == [
        ("bbox/AP", 1.5, 1.0), ("set/sem_seg/mIoU", 0.2, 1.0)]  # fmt: skip
    assert worst(figures) == 1.5 and worst([]) == 0
    assert dataclasses.replace(figures[0], value=math.inf).excess == math.inf
