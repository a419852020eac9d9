"""Parameters are grouped by stages with names that can be read."""

import pytest
import torch
from conftest import TinyModel
from detectron2.modeling import build_model
from torch import nn

from d2amp_ext import load_cfg
from d2amp_ext.monitor.stages import group_parameters

FPN = ["backbone", "fpn"]
MODELS = {
    "quick/faster_rcnn_micro.yaml": {*FPN, "rpn", "roi_box"},
    "quick/mask_rcnn_micro.yaml": {*FPN, "rpn", "roi_box", "roi_mask"},
    "quick/retinanet_micro.yaml": {*FPN, "head_cls_subnet", "head_bbox_subnet", "head_cls_score", "head_bbox_pred"},
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_bf16.yaml": {*FPN, "rpn", "roi_box", "roi_keypoint"},
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x_bf16.yaml": {*FPN, "rpn", "roi_box", "roi_mask", "sem_seg"},
    "VOC/faster_rcnn_R_50_C4_bf16.yaml": {"backbone", "rpn", "roi_res5", "roi_box"},
    "Misc/cascade_mask_rcnn_R_50_FPN_1x_bf16.yaml": {*FPN, "rpn", "roi_box", "roi_mask"},
}


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def stages(model, optimizer=None):
    return group_parameters(model, optimizer or sgd(model))


@pytest.mark.parametrize("config", MODELS)
def test_models_of_detectron2(config):
    model = build_model(load_cfg(config, ["MODEL.DEVICE", "cpu" if "micro" in config else "meta", "MODEL.WEIGHTS", ""]))
    groups = stages(model)
    assert set(groups) == MODELS[config]
    grouped = [p for group in groups.values() for p in group]
    assert len(grouped) == len(set(map(id, grouped)))
    assert set(map(id, grouped)) == {id(p) for p in model.parameters() if p.requires_grad}


class Nested(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear(*names):
    return Nested(**{name: nn.Linear(2, 2) for name in names})


@pytest.mark.parametrize(
    "model, expected",
    [
        (TinyModel(), ["first", "second"]),
        (Nested(encoder=linear("a", "b"), decoder=nn.Linear(2, 2)), ["encoder_a", "encoder_b", "decoder"]),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"]),
        (Nested(layers=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), out=nn.Linear(2, 2)), ["layers", "out"]),
        (Nested(wide=linear(*"abcdefghij"), out=nn.Linear(2, 2)), ["wide", "out"]),
        (Nested(detector=Nested(backbone=linear("stem", "res2"), roi_heads=linear("box_head"))), ["backbone", "roi_box"]),
        (Nested(model=Nested(net=linear("a", "b"), out=nn.Linear(2, 2))), ["net_a", "net_b", "out"]),
        (Nested(loss_head=nn.Linear(2, 2), out=nn.Linear(2, 2)), ["cost_head", "out"]),
        (Nested(backbone=Nested(net=linear("a"), simfp_2=linear("a"))), ["backbone", "fpn"]),
        (nn.Linear(2, 2), ["model"]),
    ],
)
def test_other_models(model, expected):
    assert list(stages(model)) == expected


def test_frozen_parameters_are_left_out_and_strange_ones_are_other():
    model = TinyModel()
    model.first.requires_grad_(False)
    extra = nn.Parameter(torch.zeros(3))
    groups = stages(model, torch.optim.SGD([*model.second.parameters(), extra], lr=0.1))
    assert list(groups) == ["second", "other"] and groups["other"][0] is extra
