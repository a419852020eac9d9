import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, DatasetEvaluators
from detectron2.structures import Boxes, Instances
from torch import nn

from d2amp_ext import PrecisionPolicy, UserError, load_cfg
from d2amp_ext.evaluation import EVALUATORS, AutocastModel, build_evaluator, in_precision, to_fp32


@pytest.fixture
def dataset(tmp_path):
    """A registered name with metadata, without data."""
    names = []

    def make(**metadata):
        name = f"d2amp_test_evaluation_{len(names)}"
        names.append(name)
        MetadataCatalog.get(name).set(thing_classes=["a"], **metadata)
        return name

    yield make
    for name in names:
        MetadataCatalog.remove(name)


def test_coco(dataset, tmp_path):
    json_file = tmp_path / "a.json"
    json_file.write_text('{"images": [], "annotations": [], "categories": []}')
    cfg = load_cfg(None, ["OUTPUT_DIR", str(tmp_path)])
    made = build_evaluator(cfg, dataset(evaluator_type="coco", json_file=str(json_file)))
    assert type(made) is COCOEvaluator and made._output_dir == str(tmp_path / "inference")


def test_panoptic_is_three_evaluators(dataset, tmp_path, monkeypatch):
    from d2amp_ext import evaluation

    made = []
    for name in ("COCOEvaluator", "SemSegEvaluator", "COCOPanopticEvaluator"):
        monkeypatch.setattr(evaluation, name, lambda *args, _name=name, **kw: made.append(_name) or _name)
    result = build_evaluator(load_cfg(), dataset(evaluator_type="coco_panoptic_seg"), str(tmp_path))
    assert isinstance(result, DatasetEvaluators) and sorted(made) == sorted(result._evaluators)
    assert made == ["SemSegEvaluator", "COCOEvaluator", "COCOPanopticEvaluator"]



def test_every_type_of_detectron2_has_an_entry():
    kinds = {MetadataCatalog.get(name).get("evaluator_type") for name in MetadataCatalog.list()} - {None}
    assert kinds >= {"coco", "lvis", "pascal_voc", "coco_panoptic_seg", "cityscapes_instance"}
    assert not kinds - set(EVALUATORS) - {"cityscapes_panoptic_seg", "ade20k_panoptic_seg", "coco_panoptic_separated"}


@pytest.mark.parametrize("metadata, found", [({}, "None"), ({"evaluator_type": "mine"}, "'mine'")])
def test_an_unknown_type_names_the_known_ones(dataset, metadata, found):
    name = dataset(**metadata)
    with pytest.raises(UserError) as error:
        build_evaluator(load_cfg(), name)
    assert name in str(error.value) and found in str(error.value) and "pascal_voc" in str(error.value)


def sixteen_bit(shape=(2,)):
    return torch.ones(shape, dtype=torch.bfloat16)


def test_everything_that_leaves_is_fp32():
    instances = Instances((4, 4))
    instances.scores = sixteen_bit()
    instances.pred_boxes = Boxes(torch.ones(2, 4))
    instances.pred_boxes.tensor = instances.pred_boxes.tensor.half()
    instances.pred_masks = torch.ones(2, 4, 4, dtype=torch.bool)
    instances.pred_classes = torch.ones(2, dtype=torch.int64)
    out = to_fp32([{"instances": instances, "sem_seg": sixteen_bit(), "panoptic_seg": (sixteen_bit(), [{"id": 1}])}])[0]
    assert out["instances"].scores.dtype is torch.float32
    assert out["instances"].pred_boxes.tensor.dtype is torch.float32
    assert out["instances"].pred_masks.dtype is torch.bool and out["instances"].pred_classes.dtype is torch.int64
    assert out["sem_seg"].dtype is torch.float32 and out["panoptic_seg"][0].dtype is torch.float32
    assert out["panoptic_seg"][1] == [{"id": 1}]
    double = torch.ones(1, dtype=torch.float64)
    assert to_fp32(double) is double


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.special = "kept"

    def forward(self, x):
        self.inside = self.layer(x).dtype
        return {"out": self.layer(x)}


def test_a_model_in_precision_computes_low_and_returns_fp32():
    model = Model()
    wrapped = in_precision(model, PrecisionPolicy("bf16"))
    assert wrapped(torch.ones(1, 4))["out"].dtype is torch.float32 and model.inside is torch.bfloat16
    assert wrapped.special == "kept" and isinstance(wrapped, AutocastModel)
    wrapped.eval()
    assert not model.training
    with pytest.raises(AttributeError):
        wrapped.nothing


def test_off_is_the_model_itself():
    model = Model()
    assert in_precision(model, PrecisionPolicy("off")) is model


def test_fp32_evaluation_inside_an_outer_autocast_is_fp32():
    model = Model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_precision(model, PrecisionPolicy("fp32"))(torch.ones(1, 4))
    assert model.inside is torch.float32
