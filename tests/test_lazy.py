"""LazyConfigs: finding and loading them, their names in our keys, and every misspelling."""

import logging

import pytest
from conftest import ROOT
from detectron2.config import LazyConfig
from omegaconf import OmegaConf

from d2amp_ext import PrecisionPolicy, UnknownKeyError, UserError, load_cfg
from d2amp_ext.config import get_key
from d2amp_ext.config_files import zoo_dir
from d2amp_ext.keys import DEFAULTS
from d2amp_ext.lazy import cfg_of, lazy_name, lazy_names, load_lazy, warn_of_unused

MICRO = "quick/faster_rcnn_micro.py"
ZOO = sorted(path.relative_to(zoo_dir()).as_posix() for path in zoo_dir().rglob("*.py") if "common" not in path.parts)
ON = "train.amp.enabled=True"


@pytest.fixture
def config():
    return load_lazy(MICRO)


def cfg_with(*overrides):
    return cfg_of(load_lazy(MICRO, overrides))


# Files


def test_our_own_recipe_is_found_by_its_name(config, tmp_path, monkeypatch):
    assert set(config) >= {"model", "train", "optimizer", "dataloader", "lr_multiplier"}
    monkeypatch.chdir(ROOT / "configs" / "quick")
    assert load_lazy("faster_rcnn_micro.py") == config
    assert load_lazy(str(ROOT / "configs" / MICRO)) == config


@pytest.mark.parametrize("name", ZOO)
def test_every_config_of_detectron2_is_taken(name):
    config = load_lazy(name, [ON, "train.amp.precision=float16", "train.amp.scaler.init_scale=512"])
    policy = PrecisionPolicy.from_cfg(cfg_of(config))
    assert policy.precision == "fp16" and policy.scaler.init_scale == 512
    assert policy == PrecisionPolicy.from_lazy(config.train.amp)


def test_what_detectron2s_settings_become():
    cfg = cfg_of(load_lazy("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.py", ["train.output_dir=out", "train.seed=3"]))
    assert (cfg.OUTPUT_DIR, cfg.SEED, cfg.MODEL.DEVICE, cfg.SOLVER.MAX_ITER) == ("out", 3, "cuda", 90000)
    assert cfg.MODEL.WEIGHTS == "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR, cfg.SOLVER.CHECKPOINT_PERIOD) == (16, 0.02, 5000)
    assert (tuple(cfg.DATASETS.TRAIN), tuple(cfg.DATASETS.TEST)) == (("coco_2017_train",), ("coco_2017_val",))
    assert (cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.ROI_HEADS.NUM_CLASSES) == ("GeneralizedRCNN", 80)
    assert not cfg.SOLVER.AMP.ENABLED and PrecisionPolicy.from_cfg(cfg).precision == "off"


@pytest.mark.parametrize(
    "text, words",
    [
        ("model = dict(", ["syntax error"]),
        ("import nothing_like_this", ["nothing_like_this"]),
        ("raise RuntimeError('weights are missing')", ["RuntimeError", "weights are missing"]),
        ("train = dict()", ["has no `model`", MICRO]),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_lazy(str(path))
    assert all(word in str(error.value) for word in [str(path), *words])


def test_a_name_that_is_nowhere_has_near_ones():
    with pytest.raises(UserError, match="Did you mean.*COCO-Detection/retinanet_R_50_FPN_1x.py"):
        load_lazy("COCO-Detection/retinanet_R_50_FPN.py")
    with pytest.raises(UserError, match="--config-file is missing"):
        load_lazy("")


def test_yaml_is_for_the_other_command_unless_it_is_trusted(tmp_path, config):
    with pytest.raises(UserError, match="d2amp train.*--trust"):
        load_lazy("quick/faster_rcnn_micro.yaml")
    path = tmp_path / "config.yaml"
    LazyConfig.save(config, str(path))
    with pytest.raises(UserError, match="--trust"):
        load_lazy(str(path))
    assert load_lazy(str(path), trust=True).train == config.train


def test_python_is_refused_by_the_yaml_road():
    with pytest.raises(UserError, match="d2amp lazy"):
        load_cfg(MICRO)


# Names


def test_every_key_has_a_twin_that_arrives():
    """Each key of our sections, set to another value on the command line, has that value in the cfg."""
    others = {
        "SOLVER.AMP.PRECISION": "bf16", "SOLVER.AMP.NONFINITE": "raise", "SOLVER.AMP.TRAINER": "Mine",
        "SOLVER.AMP.SCALER.BACKOFF_FACTOR": 0.25, "SOLVER.AMP.SCALER.STATIC": 8.0, "TEST.AMP.PRECISION": "bf16",
        "FAST.LEVEL": 0,
    }  # fmt: skip
    refused_so_far = {"SOLVER.AMP.COMM_HOOK", "FAST.DISABLE", "MONITOR.WRITERS"}
    for key, default in DEFAULTS.items():
        name = lazy_name(key)
        if key == "SOLVER.AMP.FP32_MODULES":
            assert get_key(cfg_with(ON, f"{name}=[one,Two]"), key) == ("one", "Two")
        elif name.startswith("train.") and key not in refused_so_far:
            value = others.get(key, not default if isinstance(default, bool) else default * 2)
            found = get_key(cfg_with(ON, f"{name}={value}"), key)
            assert found == value and type(found) is type(default), key


@pytest.mark.parametrize("override", ["train.amp.comm_hook=bf16", "train.fast.level=2"])
def test_what_is_not_there_yet_is_refused_under_the_name_that_was_written(override):
    with pytest.raises(UserError) as error:
        cfg_with(ON, override)
    assert str(error.value).startswith(override.partition("=")[0]) and "SOLVER" not in str(error.value)


@pytest.mark.parametrize(
    "override, near",
    [
        ("train.amp.enable=True", "train.amp.enabled"),  # Found: trained in fp32 without a word
        ("train.amp.precison=bf16", "train.amp.precision"),
        ("train.amp.scaler.init_scal=2", "train.amp.scaler.init_scale"),
        ("train.eval_amp.enable=True", "train.eval_amp.enabled"),
        ("train.fast.levl=0", "train.fast.level"),
        ("train.monitor.perod=1", "train.monitor.period"),
        ("train.acumulate_steps=2", "train.accumulate_steps"),
        ("train.max_itr=3", "train.max_iter"),
        ("train.checkpointer.periot=3", "train.checkpointer.period"),
        ("trian.amp.enabled=True", "train.amp.enabled"),  # Found: trained without AMP and without a word
        ("optimiser=3", "optimizer"),
    ],
)
def test_a_misspelt_override_is_an_error_with_the_nearest_name(override, near):
    with pytest.raises(UnknownKeyError) as error:
        load_lazy(MICRO, [override])
    assert override.partition("=")[0] in str(error.value) and f"Did you mean {near}?" in str(error.value)


@pytest.mark.parametrize(
    "section, name, near",
    [
        ("amp", "enable", "train.amp.enabled"),
        ("amp", "PRECISION", "train.amp.precision"),
        ("eval_amp", "dtype", "train.eval_amp.precision"),
    ],
)
def test_a_misspelt_name_in_the_file_is_an_error_too(config, section, name, near):
    config.train[section][name] = True
    with pytest.raises(UnknownKeyError, match=f"train.{section}.{name}") as error:
        cfg_of(config)
    assert near in str(error.value)


def test_a_new_name_of_ones_own_is_added_on_purpose():
    assert load_lazy(MICRO, ["+train.my_note=hello"]).train.my_note == "hello"
    assert load_lazy(MICRO, ["model.anything=1"]).model.anything == 1  # an argument of a LazyCall


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["train.amp.precision=bf17"], ["train.amp.precision", "bf17", "bf16"]),
        (["train.amp.scaler.growth_factor=1"], ["train.amp.scaler.growth_factor", "above 1"]),
        (["train.amp.enabled=perhaps"], ["train.amp.enabled", "perhaps"]),
        (["train.amp=bf16"], ["train.amp", "mapping"]),
        (["train.accumulate_steps=2"], ["train.accumulate_steps", "train.amp.enabled"]),
        ([ON, "train.accumulate_steps=0"], ["train.accumulate_steps", "1 or more"]),
        ([ON, "train.amp.precision=fp32", "train.float32_precision=high"], ["train.amp.precision", "train.float32_precision"]),
        (["train.monitor.period=-1"], ["train.monitor.period", "-1"]),
        (["SOLVER.AMP.ENABLED", "True"], ["train.amp.enabled=True"]),
        (["train.max_iter"], ["train.max_iter", "key=value"]),
        (["train.max_iter=[1"], ["train.max_iter=[1"]),
    ],
)
def test_a_value_that_cannot_work_is_named_as_it_was_written(overrides, words):
    with pytest.raises(UserError) as error:
        cfg_with(*overrides)
    assert all(word in str(error.value) for word in words)
    assert "SOLVER" not in str(error.value).replace("'SOLVER.AMP.ENABLED'", "")


@pytest.mark.parametrize("spelt, name", [("16", "fp16"), ("no", "fp32"), ("BF16-mixed", "bf16"), ("half", "fp16"), ("32", "fp32")])
def test_the_spellings_of_yaml(spelt, name):
    assert PrecisionPolicy.from_cfg(cfg_with(ON, f"train.amp.precision={spelt}")).precision == name


def test_errors_of_later_checks_have_lazy_names():
    with pytest.raises(UserError, match=r"^dataloader.train.dataset.names has 'x' \(train.amp.shield\)$"):
        with lazy_names():
            raise UserError("DATASETS.TRAIN has 'x' (SOLVER.AMP.SHIELD (train.amp.shield))".replace("((", "("))
    with pytest.raises(KeyError):
        with lazy_names():
            raise UnknownKeyError("SEED")


def test_settings_without_effect_are_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_unused(cfg_with("train.amp.precision=bf16", "train.amp.scaler.static=2"))
        warn_of_unused(cfg_with(ON, "train.amp.precision=bf16"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "train.amp.precision" in message and "train.amp.scaler.static" in message and "SOLVER" not in message


def test_an_older_train_node_has_the_defaults(config):
    config.train = OmegaConf.create({"amp": {"enabled": True}, "output_dir": "o", "max_iter": 5})
    cfg = cfg_of(config)
    assert cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.PRECISION == "auto" and cfg.MONITOR.PERIOD == 20
    del config.train["amp"]
    assert not cfg_of(config).SOLVER.AMP.ENABLED
