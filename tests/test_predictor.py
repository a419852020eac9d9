import logging
import pickle
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultPredictor
from detectron2.modeling import GeneralizedRCNNWithTTA, build_model
from detectron2.structures import pairwise_iou

from d2amp_ext import Predictor, UserError, load_cfg
from d2amp_ext.evaluation import AutocastModel

BF16 = ["TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"]
KEYPOINTS = [
    "MODEL.KEYPOINT_ON", "True", "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", "(16,)",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "3", "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION", "7",
]  # fmt: skip
PANOPTIC = [
    "MODEL.META_ARCHITECTURE", "PanopticFPN", "MODEL.SEM_SEG_HEAD.CONVS_DIM", "16",
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES", "4", "MODEL.SEM_SEG_HEAD.NORM", "",
]  # fmt: skip
TTA = ["TEST.AUG.ENABLED", "True", "TEST.AUG.MIN_SIZES", "(40, 48)", "TEST.AUG.MAX_SIZE", "64"]
MODELS = {
    "box": ("faster_rcnn", []),
    "mask": ("mask_rcnn", []),
    "keypoint": ("faster_rcnn", KEYPOINTS),
    "retinanet": ("retinanet", []),
    "panoptic": ("mask_rcnn", PANOPTIC),
}


@pytest.fixture(autouse=True)
def data_folder(monkeypatch, datasets_dir):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))


@pytest.fixture(scope="session")
def run_dir(run_tool, tmp_path_factory):
    """The output folder of a short run of the mask recipe. Test files that import the fixture share the run."""
    folder = tmp_path_factory.getbasetemp() / "prediction_run"
    if not (folder / "model_final.pth").is_file():
        run_tool("d2amp_ext.cli", "train", "--config-file", "quick/mask_rcnn_micro.yaml", "SOLVER.MAX_ITER", "8",
                 "TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.NUM_ITER", "8",  # or the score of objects can be 0
                 "DATASETS.TEST", "()", "OUTPUT_DIR", folder,
                 cwd=folder.parent, check=0)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A function that returns random weights of a kind of model, as a file."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("weights") / f"{kind}.pth"
            torch.manual_seed(0)
            model = build_model(micro(kind)).train()
            with torch.no_grad():  # running statistics that fit, or activations grow without bound
                for _ in range(10):
                    model.backbone(torch.rand(2, 3, 64, 64) * 255 - 127)
            torch.save({"model": model.state_dict()}, made[kind])
        return str(made[kind])

    return get


def micro(kind, *opts):
    recipe, more = MODELS[kind]
    return load_cfg(f"quick/{recipe}_micro.yaml", [*more, "MODEL.DEVICE", "cpu", *opts])


def picture(height=48, width=64):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def same(a, b):
    """Whether two predictions of one image have the same fields with the same bits."""
    a, b = a["instances"].get_fields(), b["instances"].get_fields()
    tensors = [(getattr(a[name], "tensor", a[name]), getattr(b[name], "tensor", b[name])) for name in a]
    return list(a) == list(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in tensors)


# Precision


@pytest.mark.parametrize("kind", ["mask", "keypoint", "retinanet"])
def test_without_test_amp_it_gives_the_bits_of_default_predictor(kind, weights):
    cfg = micro(kind, "MODEL.WEIGHTS", weights(kind))
    predictor = Predictor(cfg)
    assert predictor.policy.precision == "off"
    ours, stock = predictor(picture()), DefaultPredictor(cfg)(picture())
    assert len(ours["instances"]) > 0
    assert same(ours, stock)


@pytest.mark.parametrize("precision, kinds", [("bf16", ["box", "mask", "keypoint"]), ("fp16", ["box"])])
def test_16_bit_predictions_are_fp32_numbers_close_to_those_of_fp32(precision, kinds, weights):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for kind in kinds:
        opts = ["MODEL.WEIGHTS", weights(kind), "MODEL.ROI_HEADS.NMS_THRESH_TEST", "1.0"]
        stock = DefaultPredictor(micro(kind, *opts))(picture())["instances"]
        predictor = Predictor(micro(kind, *opts, *BF16[:3], precision))
        seen = []
        predictor.model.backbone.register_forward_hook(lambda module, args, out: seen.append(out["p2"].dtype))
        ours = predictor(picture())["instances"]
        assert seen == [dtype], kind
        assert list(ours.get_fields()) == list(stock.get_fields()) and len(ours) == len(stock) > 0
        for name, field in ours.get_fields().items():
            expected = getattr(stock.get(name), "tensor", stock.get(name))
            assert getattr(field, "tensor", field).dtype == expected.dtype, (kind, name)
        for name in ("pred_keypoints", "pred_keypoint_heatmaps"):
            assert not ours.has(name) or ours.get(name).dtype == torch.float32
        # Boxes with scores so close may change places.
        torch.testing.assert_close(ours.scores, stock.scores, atol=0.01, rtol=0.02)
        assert pairwise_iou(stock.pred_boxes, ours.pred_boxes).amax(dim=1).median() > 0.9


def test_every_output_of_a_panoptic_model_is_fp32(weights):
    predictions = Predictor(micro("panoptic", "MODEL.WEIGHTS", weights("panoptic"), *BF16))(picture())
    assert predictions["sem_seg"].dtype == torch.float32 and predictions["sem_seg"].shape == (4, 48, 64)
    assert predictions["instances"].scores.dtype == torch.float32
    segments, info = predictions["panoptic_seg"]
    assert segments.shape == (48, 64) and isinstance(info, list)


def test_fp32_turns_tf32_off_while_it_predicts_and_back_afterwards(weights, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    opts = ["MODEL.WEIGHTS", weights("box"), "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "fp32"]
    predictor = Predictor(micro("box", *opts))
    seen = []
    predictor.model.backbone.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    predictor(picture())
    assert seen == [False] and torch.backends.cudnn.allow_tf32


# Test-time augmentation


def test_tta_runs_in_bf16_and_returns_fp32(weights):
    opts = ["MODEL.WEIGHTS", weights("mask"), *TTA]
    predictor = Predictor(micro("mask", *opts, *BF16))
    assert isinstance(predictor.model, AutocastModel) and isinstance(predictor.model.module, GeneralizedRCNNWithTTA)
    seen = []
    predictor.model.module.model.backbone.register_forward_hook(lambda *args: seen.append(args[2]["p2"].dtype))
    instances = predictor(picture(96, 128))["instances"]
    assert set(seen) == {torch.bfloat16} and len(seen) >= 2
    assert len(instances) > 0 and instances.pred_masks.shape == (len(instances), 96, 128)
    assert instances.scores.dtype == instances.pred_boxes.tensor.dtype == torch.float32

    stock_model = DefaultPredictor(micro("mask", *opts))
    stock_model.model = GeneralizedRCNNWithTTA(stock_model.cfg, stock_model.model)
    assert same(Predictor(micro("mask", *opts))(picture()), stock_model(picture()))


@pytest.mark.parametrize(
    "kind, named",
    [("retinanet", "META_ARCHITECTURE RetinaNet"), ("keypoint", "KEYPOINT_ON True"), ("panoptic", "PanopticFPN")],
)
def test_tta_of_a_model_that_has_none_is_an_error(kind, named):
    with pytest.raises(UserError, match=f"TEST.AUG.ENABLED.*{named}.*Set TEST.AUG.ENABLED False"):
        Predictor(micro(kind, *TTA))


# Weights


def test_the_final_model_of_a_run_predicts_in_stock_detectron2(run_dir):
    stock = get_cfg()
    stock.merge_from_file(str(run_dir / "config_stock.yaml"))
    stock.MODEL.WEIGHTS = str(run_dir / "model_final.pth")
    stock.MODEL.DEVICE = "cpu"
    predictor = DefaultPredictor(stock)
    trained = torch.load(run_dir / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(value, trained[name]) for name, value in predictor.model.state_dict().items())
    theirs = predictor(picture())
    ours = Predictor(load_cfg(str(run_dir / "config.yaml"), ["MODEL.WEIGHTS", stock.MODEL.WEIGHTS]))(picture())
    assert len(theirs["instances"]) > 0
    assert same(ours, theirs)
    assert same(Predictor(stock)(picture()), theirs)  # a cfg without our keys


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")  # makes the file when it is unpickled


@pytest.mark.parametrize("suffix", [".pkl", ".pth"])
def test_weights_that_would_run_code_are_refused(suffix, tmp_path):
    mark, path = tmp_path / "mark", tmp_path / f"hostile{suffix}"
    if suffix == ".pkl":
        path.write_bytes(pickle.dumps({"model": {}, "__author__": "x", "more": Hostile(str(mark))}))
    else:
        torch.save({"model": {}, "more": Hostile(str(mark))}, path)
    cfg = micro("box", "MODEL.WEIGHTS", str(path))
    with pytest.raises(UserError, match=rf"{path.name}.*could run code.*--trust"):
        Predictor(cfg)
    assert not mark.exists()


def test_trusted_weights_may_hold_objects(tmp_path, weights):
    state = torch.load(weights("box"), weights_only=True)["model"]
    path = tmp_path / "trusted.pth"
    torch.save({"model": state, "from": PurePosixPath("a/b")}, path)
    cfg = micro("box", "MODEL.WEIGHTS", str(path))
    with pytest.raises(UserError, match="trusted.pth.*objects other than tensors"):
        Predictor(cfg)
    expected = Predictor(micro("box", "MODEL.WEIGHTS", weights("box")))(picture())
    assert same(Predictor(cfg, trust=True)(picture()), expected)


def test_missing_weights_are_named_and_empty_ones_are_warned_about(caplog):
    with pytest.raises(UserError, match=r"MODEL.WEIGHTS = 'nowhere/model.pth'.*does not exist"):
        Predictor(micro("box", "MODEL.WEIGHTS", "nowhere/model.pth"))
    with caplog.at_level(logging.WARNING, "d2amp_ext"):
        Predictor(micro("box"))
    assert "random weights" in caplog.text


# The cfg, the device, the input


def test_the_cfg_is_copied_and_a_missing_cuda_device_is_replaced(weights, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    cfg = micro("box", "MODEL.WEIGHTS", weights("box"), "MODEL.DEVICE", "cuda")
    cfg.freeze()
    before = cfg.dump()
    predictor = Predictor(cfg)
    assert cfg.dump() == before and predictor.cfg.is_frozen()
    assert predictor.cfg.MODEL.DEVICE == "cpu" and predictor.cfg.MODEL.WEIGHTS == weights("box")
    assert next(predictor.model.parameters()).device.type == "cpu" and not predictor.model.training


def test_a_precision_that_the_device_cannot_do_is_an_error(monkeypatch):
    monkeypatch.setattr("d2amp_ext._compat.native_precisions", lambda *_: (frozenset(), frozenset()))
    with pytest.raises(UserError, match="cannot run it"):
        Predictor(micro("box", *BF16))


def test_an_image_of_another_shape_is_an_error(weights):
    predictor = Predictor(micro("box", "MODEL.WEIGHTS", weights("box")))
    for wrong in (np.zeros((8, 8), np.uint8), np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)):
        with pytest.raises(UserError, match=r"must be \(height, width, 3\) in BGR order"):
            predictor(wrong)


# Class names


def test_class_names_come_from_the_test_set_or_else_from_the_training_set():
    predictor = Predictor(micro("box"))
    assert predictor.metadata is MetadataCatalog.get("d2amp_shapes_val")
    assert predictor.metadata.thing_classes == ["rectangle", "disc", "triangle"]
    assert Predictor(micro("box", "DATASETS.TEST", "()")).metadata is MetadataCatalog.get("d2amp_shapes_train")


def test_without_data_sets_classes_are_numbered(caplog):
    with caplog.at_level(logging.WARNING, "d2amp_ext"):
        predictor = Predictor(micro("box", "DATASETS.TEST", "()", "DATASETS.TRAIN", "()"))
    assert predictor.metadata.thing_classes == ["class 0", "class 1", "class 2"]
    assert "3 thing classes and DATASETS is empty" in caplog.text


def test_names_of_a_set_with_another_number_of_classes_are_not_used(caplog):
    with caplog.at_level(logging.WARNING, "d2amp_ext"):
        predictor = Predictor(micro("box", "DATASETS.TEST", "('coco_2017_val',)"))
    assert predictor.metadata.thing_classes == ["class 0", "class 1", "class 2"]
    assert not predictor.metadata.get("thing_dataset_id_to_contiguous_id")
    assert "3 thing classes and coco_2017_val has 80" in caplog.text
    assert len(MetadataCatalog.get("coco_2017_val").thing_classes) == 80


def test_a_panoptic_model_keeps_the_names_that_fit_and_numbers_the_others():
    metadata = Predictor(micro("panoptic")).metadata
    assert metadata.thing_classes == ["rectangle", "disc", "triangle"]
    assert metadata.stuff_classes == ["class 0", "class 1", "class 2", "class 3"]
    assert not hasattr(MetadataCatalog.get("d2amp_shapes_val"), "stuff_classes")


def test_annotations_need_not_be_there(tmp_path, caplog):
    gone = f"away_train=coco:{tmp_path}/gone.json:{tmp_path}"
    opts = ["DATASETS.REGISTER", f"({gone!r},)", "DATASETS.TRAIN", "('away_train',)"]
    with caplog.at_level(logging.WARNING, "d2amp_ext"):
        predictor = Predictor(micro("box", *opts))
        assert predictor.metadata.thing_classes == ["rectangle", "disc", "triangle"]
        assert "The class names of away_train are unknown" in caplog.text and "gone.json" in caplog.text
        predictor = Predictor(micro("box", *opts, "DATASETS.TEST", "('away_train',)"))
    assert predictor.metadata.thing_classes == ["class 0", "class 1", "class 2"]
    assert "away_train" not in DatasetCatalog


def test_a_custom_register_entry_names_the_classes(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"images": [{"id": 1, "file_name": "x.png", "height": 8, "width": 8}], "annotations": [],'
        '"categories": [{"id": 5, "name": "cell"}, {"id": 7, "name": "debris"}, {"id": 9, "name": "edge"}]}'
    )
    entry = f"cells_for_prediction=coco:{tmp_path}/a.json:{tmp_path}"
    opts = ["DATASETS.REGISTER", f"({entry!r},)", "DATASETS.TEST", "('cells_for_prediction',)"]
    try:
        assert Predictor(micro("box", *opts)).metadata.thing_classes == ["cell", "debris", "edge"]
    finally:
        DatasetCatalog.pop("cells_for_prediction")
        MetadataCatalog.pop("cells_for_prediction")
