"""The report: tables, JSON and lines of config that can be used as they are; and the picture."""

import json

import numpy as np
import pytest
import yaml
from audit_models import grid, policy
from omegaconf import OmegaConf
from PIL import Image

from d2amp_ext.audit.detections import Detections
from d2amp_ext.audit.limits import Figure
from d2amp_ext.audit.measure import Auditor
from d2amp_ext.audit.plot import plot
from d2amp_ext.audit.propose import propose
from d2amp_ext.audit.report import Report
from d2amp_ext.policy import PrecisionPolicy

ORIGIN = {"config": "cfg.yaml", "weights": "model.pth", "device": "cpu", "tolerance": 0.02, "batches": 2, "images": 4}


def report(fault="", precision="bf16", lazy=False, **options):
    model, batches, images = grid(fault)
    audit = Auditor(model, policy(precision, **options), batches, images)
    measured = audit.measure()
    made = Report(ORIGIN, lazy, measured, audit.ranking(audit.policy, True), audit.ranking(audit.policy, False))
    made.proposal = propose(audit, measured) if measured.excess > 1 else None
    return made


def test_a_fine_report():
    made = report()
    text, found = made.describe(), made.as_dict()
    assert made.exceeding == [] and made.snippet == "" and found["fine"] and found["proposal"] is None
    assert "Fine: nothing exceeds its limit." in text and "<--" not in text
    for part in ("loss_box", "body", "head.out", "Conv2d", "256 matched", "tolerance 0.02"):
        assert part in text
    assert max(map(len, text.splitlines())) < 140
    json.dumps(found, allow_nan=False)


def test_lines_for_yaml_are_a_config_and_give_the_policy_that_was_tried():
    made = report("cancels")
    node = yaml.safe_load(made.snippet)["SOLVER"]["AMP"]
    assert node == {"ENABLED": True, "PRECISION": "bf16", "FP32_MODULES": ["body.4"]}
    text = made.describe()
    assert 'FP32_MODULES: ["body.4"]' in text and "Tried, and every loss" in text and "<-- above" in text
    found = made.as_dict()["proposal"]
    assert found["works"] and found["modules"] == ["body.4"] and found["measured"]["excess"] <= 1


def test_lines_for_a_lazyconfig_are_python_and_give_the_policy_that_was_tried():
    made = report("decodes", lazy=True)
    config = OmegaConf.create({"train": {"amp": {}}})
    exec(made.snippet, {"train": config.train})
    assert PrecisionPolicy.from_lazy(config.train.amp) == PrecisionPolicy("bf16", fp32_modules=("head",))


@pytest.mark.parametrize("lazy, line", [(False, "    SHIELD: True"), (True, "train.amp.shield = True")])
def test_a_shield_that_has_to_be_turned_on_is_in_the_lines(lazy, line):
    made = report("cancels", lazy=lazy, shield=False)
    made.proposal.shield = True
    assert line in made.snippet.splitlines()


def test_what_is_not_finite_is_said_and_can_be_json():
    made = report("overflows", "fp16")
    assert "not finite" in made.describe()
    found = made.as_dict()
    json.dumps(found, allow_nan=False)
    assert found["modules"]["training"][0] | {"calls": 0, "largest": 0} == {
        "module": "body.3", "class": "Conv2d", "error": "inf", "dtype": "float16", "largest": 0, "calls": 0}  # fmt: skip
    assert "scale of the losses: 65536" in made.describe()


def test_without_a_remedy_the_report_says_so():
    made = report("cancels")
    made.proposal.measurement = None
    assert made.snippet == "" and "No short list of FP32_MODULES mends it" in made.describe()


def test_a_model_that_detects_nothing_is_told():
    made = report()
    assert "Neither run detected" not in made.describe()
    made.measurement.detections = Detections(images=4)
    assert "Neither run detected anything" in made.describe()


def test_results_and_their_limits():
    made = report()
    made.results = {"bbox/AP": (40.0, 38.0), "bbox/APl": (float("nan"), float("nan"))}
    made.result_figures = [Figure("ap", "bbox/AP", 2.0, 1.0)]
    lines = [line.split() for line in made.describe().splitlines()]
    assert ["bbox/AP", "40", "38", "-2.000", "1", "<--", "above"] in lines
    assert not made.as_dict()["fine"] and made.as_dict()["results"]["bbox/AP"] == {"fp32": 40.0, "audited": 38.0}


@pytest.mark.parametrize("fault, precision", [("", "bf16"), ("overflows", "fp16")])
def test_the_picture(tmp_path, fault, precision):
    plot(report(fault, precision), str(tmp_path / "audit.png"))
    pixels = np.asarray(Image.open(tmp_path / "audit.png").convert("RGB"))
    red = (pixels == (0xC0, 0x39, 0x2B)).all(-1).sum()
    assert pixels.shape[1] == 1800 and (red > 1000) == bool(fault)
