"""`d2amp audit`, from YAML and LazyConfig: tables, JSON, picture, exit status, planted faults, mistakes."""

import json
import re

import pytest
import torch
from conftest import ROOT
from detectron2.data import build_detection_train_loader
from detectron2.modeling import ROI_HEADS_REGISTRY, StandardROIHeads, build_model
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from PIL import Image
from torch import nn

from d2amp_ext import load_cfg
from d2amp_ext.cli import main
from d2amp_ext.data.register import check_datasets, register_datasets

YAML = ["audit", "--config-file", "quick/faster_rcnn_micro.yaml", "--weights", "model.pth", "--precision", "bf16"]
LAZY = ["audit", "--config-file", "quick/faster_rcnn_micro.py", "--weights", "model.pth", "--precision", "bf16"]
CPU = ["MODEL.DEVICE", "cpu"]


@pytest.fixture(scope="module")
def weights(datasets_dir):
    """Of the micro model, with running statistics that fit its weights, so that it can be evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
        cfg = load_cfg("quick/faster_rcnn_micro.yaml", CPU)
        register_datasets(cfg)
        check_datasets(cfg)
        seed_all_rng(0)
        model = build_model(cfg)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        with EventStorage(), torch.no_grad():
            model(next(iter(build_detection_train_loader(cfg))))
    nn.init.normal_(model.roi_heads.box_predictor.bbox_pred.weight, std=0.02)
    return model.state_dict()


@pytest.fixture
def here(tmp_path, monkeypatch, datasets_dir, fresh_loggers, weights):
    """A working directory with the weights in model.pth."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    torch.save({"model": weights}, "model.pth")
    return tmp_path


def audit(path="output/audit/audit.json"):
    return json.loads(open(path).read(), parse_constant=pytest.fail)  # what is not finite is a string


def test_yaml_with_everything(here, capsys):
    before = torch.load("model.pth", weights_only=True)["model"]
    status = main([*YAML, "--batches", "2", "--images", "8", "--json", "found.json", "--tolerance", "0.1", *CPU])
    out = capsys.readouterr().out
    found = audit("found.json")
    assert found == audit() and status == (0 if found["fine"] else 3)
    assert found["precision"] == "bf16" and found["batches"] == 2 and found["images"] == 8 and found["tolerance"] == 0.1
    assert set(found["losses"]) == {"loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc"}
    assert set(found["gradients"]) == {"backbone", "fpn", "rpn", "roi_box"} and found["failure"] == ""
    assert all(0 < entry["error"] < 0.1 for entry in found["losses"].values()), found["losses"]
    assert found["detections"]["images"] == 8 and found["detections"]["matched"] > 0
    assert {"bbox/AP", "bbox/AP50"} <= set(found["results"])
    for mode in ("training", "evaluation"):
        errors = [entry["error"] for entry in found["modules"][mode]]
        assert errors == sorted(errors, reverse=True) and 0 < errors[0] < 0.01  # nothing but rounding
    for text in ("loss_rpn_loc", "rounding noise", "they add, in evaluation", "bbox/AP", "bf16", "matched detections"):
        assert text in out
    assert out.startswith("Audit of quick/faster_rcnn_micro.yaml with model.pth\n")  # stdout is for the result alone
    assert Image.open("output/audit/audit.png").size[0] > 1000
    assert not (here / "output" / "inference").exists() and (here / "output" / "audit" / "bf16").is_dir()
    after = torch.load("model.pth", weights_only=True)["model"]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_lazyconfig_is_the_same_audit_with_its_own_evaluator(here, monkeypatch, capsys):
    monkeypatch.setattr(comm, "shared_random_seed", lambda: 42)  # newer Detectron2: SEED, for the sampler from YAML alone
    few = ["--batches", "1", "--images", "1", "--tolerance", "0.5"]
    assert main([*LAZY, *few, "train.device=cpu"]) == 0
    lazy = audit()
    assert "bbox/AP" in lazy["results"] and "Fine: nothing" in capsys.readouterr().out and lazy["proposal"] is None
    assert main([*YAML, *few, "--no-ap", *CPU, "OUTPUT_DIR", "yaml"]) == 0
    yaml = audit("yaml/audit/audit.json")
    assert lazy["losses"] == yaml["losses"] and lazy["detections"] == yaml["detections"]
    assert lazy["modules"] == yaml["modules"] and yaml["results"] == {}


def test_a_layer_that_overflows_fp16_is_named_and_the_lines_that_mend_it_are_printed(here, weights, capsys):
    spoilt = {name: value.clone() for name, value in weights.items()}
    name = "backbone.bottom_up.res2.0.conv1"
    spoilt[f"{name}.weight"] *= 1e7  # its normalization layer takes it back
    spoilt[f"{name}.norm.running_mean"] *= 1e7
    spoilt[f"{name}.norm.running_var"] *= 1e14
    torch.save({"model": spoilt}, "model.pth")
    fp16 = [*YAML[:-1], "fp16", "--batches", "1", "--images", "1", "--no-ap", "--tolerance", "0.1"]
    assert main([*fp16, *CPU]) == 3
    out, found = capsys.readouterr().out, audit()
    assert found["modules"]["training"][0]["module"] == name and found["modules"]["training"][0]["error"] == "inf"
    assert found["modules"]["evaluation"][0]["module"] == name
    assert found["proposal"]["works"] and found["proposal"]["modules"] == [name]
    assert f'FP32_MODULES: ["{name}"]' in out and "not finite" in out and "<-- above" in out
    snippet = found["proposal"]["config"]
    (here / "mended.yaml").write_text(f"_BASE_: {ROOT}/configs/quick/faster_rcnn_micro.yaml\n{snippet}\n")
    mended = ["audit", "--config-file", "mended.yaml", "--weights", "model.pth"]  # the precision is in it, too
    assert main([*mended, *fp16[7:], *CPU]) == 0
    assert audit()["precision"] == "fp16" and audit()["proposal"] is None


class LowDecoder(FastRCNNOutputLayers):
    """A project's own head, which the shield leaves alone: boxes are decoded in the precision of the features."""

    def predict_boxes(self, predictions, proposals):
        deltas = predictions[1]
        boxes = super().predict_boxes(predictions, proposals)
        return tuple(per_image.to(deltas.dtype) for per_image in boxes)


@pytest.fixture
def low_heads():
    class LowHeads(StandardROIHeads):
        @classmethod
        def _init_box_head(cls, cfg, input_shape):
            made = super()._init_box_head(cfg, input_shape)
            made["box_predictor"].__class__ = LowDecoder
            return made

    ROI_HEADS_REGISTRY.register(LowHeads)
    yield "LowHeads"
    del ROI_HEADS_REGISTRY._obj_map["LowHeads"]


def test_a_head_that_decodes_in_bf16_is_named_first(here, low_heads, capsys):
    strict = ["--tolerance", "0.02", "--batches", "1", "--images", "1", "--no-ap", "--no-proposal"]
    large = [*CPU, "INPUT.MIN_SIZE_TEST", "300", "INPUT.MAX_SIZE_TEST", "400",  # where small boxes have large coordinates
             "MODEL.ANCHOR_GENERATOR.SIZES", "[[8], [8], [8], [8]]"]  # fmt: skip
    main([*YAML, *strict, *large, "MODEL.ROI_HEADS.NAME", low_heads])
    first, second = audit()["modules"]["evaluation"][:2]
    assert first["module"] == "roi_heads.box_predictor.predict_boxes" and first["error"] > 2 * second["error"]
    assert first["class"] == "LowDecoder" and first["dtype"] == "bfloat16"
    log = capsys.readouterr().err
    assert "left alone" in log and "LowDecoder" in log
    main([*YAML, *strict, *large, "MODEL.ROI_HEADS.NAME", low_heads, "SOLVER.AMP.FP32_MODULES", "roi_heads.box_predictor"])
    ranked = {entry["module"]: entry["error"] for entry in audit()["modules"]["evaluation"]}
    assert ranked.get(first["module"], 0) == 0 < max(ranked.values()) < first["error"]


def test_evaluation_can_be_left_out_and_then_no_test_set_is_needed(here):
    args = [*YAML, "--images", "0", "--batches", "1", "--no-proposal", *CPU, "DATASETS.TEST", "()"]
    assert main(args) in (0, 3)
    assert audit()["detections"] is None and audit()["modules"]["evaluation"] == [] and audit()["results"] == {}


@pytest.mark.parametrize("args, message", [
    (["audit"], "--config-file is missing"),
    ([*YAML[:3], *YAML[5:], *CPU], r'MODEL.WEIGHTS is "", and an audit of random weights'),
    ([*YAML, "--images", "-1", *CPU], "--images -1"),
    ([*YAML, "--batches", "0", *CPU], "--batches 0"),
    ([*YAML, "--tolerance", "0", *CPU], "--tolerance 0: must lie between 0 and 1"),
    ([*YAML, "--json", "no/such/folder.json", *CPU], "--json no/such/folder.json"),
    ([*YAML[:-1], "fp32", *CPU], "'fp32' is fp32 on cpu, and an audit compares with fp32"),
    ([*YAML[:-1], "tf32", *CPU], "'tf32' is fp32 on cpu"),
    ([*YAML[:-1], "bf61", *CPU], "bf61"),
    ([*YAML, *CPU, "DATASETS.TEST", "()"], "DATASETS.TEST is empty.*--images 0"),
    ([*YAML, *CPU, "DATASETS.TRAIN", "()"], "DATASETS.TRAIN is empty"),
    ([*YAML, *CPU, "DATASETS.TEST", "('nothing',)"], "'nothing', which is not a registered data set"),
    ([*YAML, *CPU, "SOLVER.AMP.FP32_MODULES", "roi_hats.*"], "'roi_hats.*', which matches no module.*roi_heads"),
    ([*YAML, *CPU, "SOLVER.AMP.PRECISON", "bf16"], "Did you mean SOLVER.AMP.PRECISION"),
    (["audit", "--config-file", "no.yaml"], "no.yaml"),
    ([*YAML, *CPU, "OUTPUT_DIR", "s3://bucket/run"], "OUTPUT_DIR = 's3://bucket/run' is no local folder"),
    ([*YAML[:4], "gone.pth", *CPU], "gone.pth"),
    ([*LAZY[:3], *LAZY[5:]], "train.init_checkpoint is"),
    ([*LAZY, "train.amp.shields=False"], "train.amp.shields"),
])  # fmt: skip
def test_mistakes_are_one_line(here, args, message, capsys):
    assert main(args) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert not (here / "output" / "audit" / "audit.json").exists()
