# The LazyConfig twin of faster_rcnn_micro.yaml: the same model, data and schedule.
import torch
from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data import transforms as T
from detectron2.evaluation import COCOEvaluator
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import FPN, BasicStem, ResNet
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.resnet import BottleneckBlock
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import FastRCNNConvFCHead, FastRCNNOutputLayers, StandardROIHeads
from detectron2.solver import WarmupParamScheduler
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import MultiStepParamScheduler

from ..common.train import train


def _stage(blocks, stride, in_channels, out_channels):
    return L(ResNet.make_stage)(
        block_class=BottleneckBlock,
        num_blocks=blocks,
        stride_per_block=[stride] + [1] * (blocks - 1),
        in_channels=in_channels,
        out_channels=out_channels,
        bottleneck_channels=out_channels // 2,
        stride_in_1x1=True,
        norm="BN",
    )


model = L(GeneralizedRCNN)(
    backbone=L(FPN)(
        bottom_up=L(ResNet)(
            stem=L(BasicStem)(in_channels=3, out_channels=16, norm="BN"),
            stages=[_stage(3, 1, 16, 16), _stage(4, 2, 16, 32), _stage(6, 2, 32, 64), _stage(3, 2, 64, 128)],
            out_features=["res2", "res3", "res4", "res5"],
            freeze_at=0,
        ),
        in_features="${.bottom_up.out_features}",
        out_channels=32,
        norm="BN",
        top_block=L(LastLevelMaxPool)(),
    ),
    proposal_generator=L(RPN)(
        in_features=["p2", "p3", "p4", "p5"],
        head=L(StandardRPNHead)(in_channels=32, num_anchors=3),
        anchor_generator=L(DefaultAnchorGenerator)(
            sizes=[[8], [16], [32], [48]],
            aspect_ratios=[0.5, 1.0, 2.0],
            strides=[4, 8, 16, 32],
            offset=0.0,
        ),
        anchor_matcher=L(Matcher)(thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True),
        box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=64,
        positive_fraction=0.5,
        pre_nms_topk=(100, 50),
        post_nms_topk=(50, 50),
        nms_thresh=0.7,
    ),
    roi_heads=L(StandardROIHeads)(
        num_classes=3,
        batch_size_per_image=32,
        positive_fraction=0.25,
        proposal_matcher=L(Matcher)(thresholds=[0.5], labels=[0, 1], allow_low_quality_matches=False),
        box_in_features=["p2", "p3"],
        box_pooler=L(ROIPooler)(
            output_size=5,
            scales=(1 / 4, 1 / 8),
            sampling_ratio=0,
            pooler_type="ROIAlignV2",
        ),
        box_head=L(FastRCNNConvFCHead)(
            input_shape=ShapeSpec(channels=32, height=5, width=5),
            conv_dims=[],
            fc_dims=[64],
        ),
        box_predictor=L(FastRCNNOutputLayers)(
            input_shape=ShapeSpec(channels=64),
            box2box_transform=L(Box2BoxTransform)(weights=(10, 10, 5, 5)),
            num_classes="${..num_classes}",
            test_score_thresh=0.0,
            test_topk_per_image=20,
        ),
    ),
    pixel_mean=[103.530, 116.280, 123.675],
    pixel_std=[1.0, 1.0, 1.0],
    input_format="BGR",
)

dataloader = dict(
    train=L(build_detection_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="d2amp_shapes_train"),
        mapper=L(DatasetMapper)(
            is_train=True,
            augmentations=[
                L(T.ResizeShortestEdge)(short_edge_length=(48,), max_size=64, sample_style="choice"),
                L(T.RandomFlip)(horizontal=True),
            ],
            image_format="BGR",
        ),
        total_batch_size=2,
        num_workers=0,
    ),
    test=L(build_detection_test_loader)(
        dataset=L(get_detection_dataset_dicts)(names="d2amp_shapes_val", filter_empty=False),
        mapper=L(DatasetMapper)(
            is_train=False,
            augmentations=[L(T.ResizeShortestEdge)(short_edge_length=48, max_size=64)],
            image_format="BGR",
        ),
        num_workers=0,
    ),
    evaluator=L(COCOEvaluator)(dataset_name="${..test.dataset.names}"),
)

optimizer = L(torch.optim.SGD)(
    # The training script sets params.model to the model before it makes the optimizer.
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0),
    lr=0.02,
    momentum=0.9,
    weight_decay=1e-4,
)

train.max_iter = 20
train.eval_period = 0  # at the end only
train.seed = 42

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0], milestones=[], num_updates="${train.max_iter}"),
    warmup_factor=0.001,
    warmup_length=5 / train.max_iter,
    warmup_method="linear",
)
