"""Evaluation: which evaluator a data set needs, and running a model in the evaluation's own precision."""

import contextlib
import os

import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)
from detectron2.structures import Instances
from torch import nn

from .errors import UserError
from .numerics.protect import protect
from .numerics.shield import report_frozen_scales


def _coco(name, folder):
    return COCOEvaluator(name, output_dir=folder)


def _sem_seg(name, folder):
    return SemSegEvaluator(name, distributed=True, output_dir=folder)


# The metadata `evaluator_type` of a data set -> functions of (data set name, output folder) that make its evaluators.
EVALUATORS = {
    "coco": (_coco,),
    "coco_panoptic_seg": (_sem_seg, _coco, lambda name, folder: COCOPanopticEvaluator(name, folder)),
    "sem_seg": (_sem_seg,),
    "cityscapes_instance": (lambda name, folder: CityscapesInstanceEvaluator(name),),
    "cityscapes_sem_seg": (lambda name, folder: CityscapesSemSegEvaluator(name),),
    "pascal_voc": (lambda name, folder: PascalVOCDetectionEvaluator(name),),
    "lvis": (lambda name, folder: LVISEvaluator(name, output_dir=folder),),
}


def build_evaluator(cfg, dataset_name, output_folder=None):
    """The evaluator of a data set, chosen by the `evaluator_type` in its metadata.

    Args:
        cfg (CfgNode):
        dataset_name (str): a name in DATASETS.TEST.
        output_folder (str or None): for the predictions. None: OUTPUT_DIR/inference.

    Returns:
        DatasetEvaluator

    Raises:
        UserError: when the type is missing or unknown.
    """
    kind = getattr(MetadataCatalog.get(dataset_name), "evaluator_type", None)
    if kind not in EVALUATORS:
        raise UserError(
            f"The data set {dataset_name} has evaluator_type {kind!r} in its metadata; known are {', '.join(EVALUATORS)}. "
            f"Set it with MetadataCatalog.get({dataset_name!r}).set(evaluator_type='coco'), or override build_evaluator."
        )
    folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
    evaluators = [make(dataset_name, folder) for make in EVALUATORS[kind]]
    return evaluators[0] if len(evaluators) == 1 else DatasetEvaluators(evaluators)


class AutocastModel(nn.Module):
    """A model that runs under a policy's autocast and returns fp32. Attributes are those of the model inside."""

    def __init__(self, model, policy):
        """
        Args:
            model (nn.Module):
            policy (PrecisionPolicy): resolved.
        """
        super().__init__()
        self.module = model
        self.policy = policy
        self.training = model.training

    def forward(self, *args, **kwargs):
        with self.policy.autocast():
            outputs = self.module(*args, **kwargs)
        return to_fp32(outputs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def in_precision(model, policy):
    """`model` under `policy`, or `model` itself when the policy is off.

    Args:
        model (nn.Module):
        policy (PrecisionPolicy): not resolved; it is for the device of the model.
    """
    parameter = next(model.parameters(), torch.zeros(()))
    policy = policy.resolve(parameter.device, "Precision of evaluation")
    if policy.precision == "off":
        return model
    protect(model, policy)
    report_frozen_scales(model)
    return AutocastModel(model, policy)


@contextlib.contextmanager
def evaluating(model, policy):
    """A context that gives `model` as it is to be evaluated: under `policy`, with its fp32 switches.

    Args:
        model (nn.Module): one that is under a policy already stays under that.
        policy (PrecisionPolicy): not resolved.
    """
    model = in_precision(model, policy)
    with getattr(model, "policy", policy).float32_switches():
        yield model


def to_fp32(value):
    """`value` with every 16-bit float tensor in it as fp32: in lists, tuples, dicts, Instances and Boxes."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Instances):
        for name, field in value.get_fields().items():
            value.set(name, to_fp32(field))
        return value
    if isinstance(value, dict):
        return type(value)((name, to_fp32(item)) for name, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(to_fp32(item) for item in value)
    if isinstance(getattr(value, "tensor", None), torch.Tensor):  # Boxes, RotatedBoxes, Keypoints ...
        value.tensor = to_fp32(value.tensor)
    return value
