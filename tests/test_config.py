import copy
import itertools
import pickle

import pytest
from detectron2.config import get_cfg

from d2amp_ext import PrecisionPolicy, UnknownKeyError, UserError, add_amp_config, load_cfg
from d2amp_ext.config import DEFAULTS, NOT_YET, get_key, unused_amp_keys, write_stock_config

ARTICLE = """MODEL:
  MASK_ON: False
SOLVER
  IMS_PER_BATCH: 16
  AMP
    ENABLED: True
"""


def fresh():
    cfg = get_cfg()
    add_amp_config(cfg)
    return cfg


def write(folder, text, name="cfg.yaml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_every_key_of_the_table_is_added_with_its_default():
    cfg = fresh()
    assert all(get_key(cfg, key) == default for key, default in DEFAULTS.items())
    assert cfg.SOLVER.AMP.ENABLED is False


def test_adding_twice_changes_nothing():
    cfg = fresh()
    cfg.SOLVER.AMP.PRECISION = "bf16"
    before = copy.deepcopy(cfg)
    add_amp_config(cfg)
    assert cfg == before and type(cfg) is type(before)


def test_a_key_of_another_project_keeps_its_value_whoever_comes_first():
    theirs_first = get_cfg()
    theirs_first.SOLVER.OPTIMIZER = "ADAMW"
    add_amp_config(theirs_first)
    ours_first = fresh()
    ours_first.SOLVER.OPTIMIZER = "ADAMW"
    assert theirs_first.SOLVER.OPTIMIZER == ours_first.SOLVER.OPTIMIZER == "ADAMW"


SPELT = [("16", "fp16"), ("32", "fp32"), ("no", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16"), ("'16-mixed'", "fp16")]


@pytest.mark.parametrize("text, name", SPELT)
@pytest.mark.parametrize("key", ["SOLVER.AMP.PRECISION", "TEST.AMP.PRECISION"])
def test_spellings_from_file_and_command_line_in_any_order(tmp_path, key, text, name):
    section = key.split(".")[0]
    file = write(tmp_path, f"{section}:\n  AMP:\n    ENABLED: true\n    PRECISION: {text}\n")
    other = write(tmp_path, f"{section}:\n  AMP:\n    PRECISION: tf32\n", "other.yaml")
    steps = {
        "file": lambda cfg: cfg.merge_from_file(file),
        "list": lambda cfg: cfg.merge_from_list([key, text.strip("'")]),
        "other": lambda cfg: cfg.merge_from_file(other),
    }
    for order in itertools.permutations(steps):
        if order[-1] == "other":
            continue
        cfg = fresh()
        for step in order:
            steps[step](cfg)
        assert isinstance(get_key(cfg, key), str)
        cfg.merge_from_list([section + ".AMP.ENABLED", "True"])
        made = PrecisionPolicy.from_cfg(cfg) if section == "SOLVER" else PrecisionPolicy.for_evaluation(cfg)
        assert made.precision == name
        clone = pickle.loads(pickle.dumps(cfg)).clone()
        clone.merge_from_list([key, "16"])  # the class, and with it the spellings, survives
        assert get_key(clone, key) == "16"


def test_the_value_is_kept_as_it_was_written():
    assert load_cfg(None, ["SOLVER.AMP.PRECISION", "BFloat16"]).SOLVER.AMP.PRECISION == "BFloat16"


def test_integers_for_floats_and_words_for_booleans(tmp_path):
    file = write(tmp_path, "SOLVER:\n  BASE_LR: 1\n  AMP:\n    SCALER:\n      INIT_SCALE: 1024\n")
    cfg = load_cfg(file, ["SOLVER.AMP.ENABLED", "true", "SOLVER.AMP.SCALER.MIN_SCALE", "2", "MODEL.MASK_ON", "FALSE"])
    assert cfg.SOLVER.BASE_LR == 1.0 and isinstance(cfg.SOLVER.BASE_LR, float)
    assert (cfg.SOLVER.AMP.SCALER.INIT_SCALE, cfg.SOLVER.AMP.SCALER.MIN_SCALE) == (1024.0, 2.0)
    assert cfg.SOLVER.AMP.ENABLED is True and cfg.MODEL.MASK_ON is False


def test_one_data_set_need_not_be_a_tuple():
    assert load_cfg(None, ["DATASETS.REGISTER", "a=coco:b.json:c"]).DATASETS.REGISTER == ("a=coco:b.json:c",)


def test_a_dumped_config_loads_again(tmp_path):
    cfg = load_cfg("quick/faster_rcnn_micro.yaml", ["SOLVER.AMP.PRECISION", "16"])
    again = load_cfg(write(tmp_path, cfg.dump()))
    assert again.SOLVER == cfg.SOLVER and again.MODEL.ROI_HEADS == cfg.MODEL.ROI_HEADS and again.TEST == cfg.TEST


def test_stock_detectron2_reads_config_stock_yaml(tmp_path):
    cfg = load_cfg("quick/faster_rcnn_micro.yaml")
    write_stock_config(cfg, str(tmp_path / "config_stock.yaml"))
    stock = get_cfg()
    stock.merge_from_file(str(tmp_path / "config_stock.yaml"))
    assert stock.MODEL.ROI_HEADS == cfg.MODEL.ROI_HEADS and stock.SOLVER.AMP.ENABLED == cfg.SOLVER.AMP.ENABLED
    assert "PRECISION" not in stock.SOLVER.AMP
    with pytest.raises(Exception):
        get_cfg().merge_from_file(write(tmp_path, cfg.dump()))


@pytest.mark.parametrize(
    "opts, words",
    [
        (["SOLVER.AMP.PRECISON", "fp16"], ["SOLVER.AMP.PRECISON", "Did you mean SOLVER.AMP.PRECISION"]),
        (["SOLVER.AMP.PRECISION", "fp61"], ["SOLVER.AMP.PRECISION", "'fp61'", "bf16", "Did you mean"]),
        (["TEST.AMP.PRECISION", "x"], ["TEST.AMP.PRECISION", "'x'"]),
        (["SOLVER.MAX_ITER", "many"], ["SOLVER.MAX_ITER", "'many'", "int"]),
        (["SOLVER.AMP.ENABLED", "maybe"], ["SOLVER.AMP.ENABLED", "'maybe'", "bool"]),
        (["SOLVER.AMP", "1"], ["SOLVER.AMP = 1", "section"]),
        (["SOLVER.MAX_ITER"], ["SOLVER.MAX_ITER", "KEY VALUE"]),
        (["--resume", "1"], ["--resume", "Flags come before"]),
        (["SOLVER.AMP.SCALER.GROWTH_FACTOR", "1.0"], ["SOLVER.AMP.SCALER.GROWTH_FACTOR", "1.0", "above 1"]),
        (["SOLVER.AMP.NONFINITE", "ignore"], ["SOLVER.AMP.NONFINITE", "'ignore'", "skip"]),
        (["SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "-1"], ["SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "-1"]),
        (["SOLVER.ACCUMULATE_STEPS", "0", "SOLVER.AMP.ENABLED", "True"], ["SOLVER.ACCUMULATE_STEPS", "0"]),
        (["SOLVER.ACCUMULATE_STEPS", "2"], ["SOLVER.ACCUMULATE_STEPS", "ENABLED True", "PRECISION fp32"]),
        (["MONITOR.PERIOD", "-1"], ["MONITOR.PERIOD", "-1"]),
    ],
)
def test_mistakes_name_key_value_and_what_is_allowed(opts, words):
    with pytest.raises(UserError) as error:
        load_cfg(None, opts)
    assert all(word in str(error.value) for word in words)


def test_unknown_keys_are_key_errors_too(tmp_path):
    file = write(tmp_path, "SOLVER:\n  AMP:\n    PRECISIN: fp16\n")
    with pytest.raises(KeyError) as error:
        load_cfg(file)
    assert isinstance(error.value, UnknownKeyError)
    assert file in str(error.value) and "SOLVER.AMP.PRECISION" in str(error.value)


@pytest.mark.parametrize("precision, fp32_precision", [("fp32", "high"), ("fp32", "medium"), ("tf32", "highest")])
def test_float32_precision_must_not_contradict(precision, fp32_precision):
    cfg = fresh()
    if "FLOAT32_PRECISION" not in cfg:
        cfg.FLOAT32_PRECISION = ""  # older Detectron2
    opts = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision, "FLOAT32_PRECISION", fp32_precision]
    cfg.merge_from_list(opts)
    from d2amp_ext.config import check_cfg

    with pytest.raises(UserError, match="SOLVER.AMP.PRECISION.*FLOAT32_PRECISION"):
        check_cfg(cfg)


@pytest.mark.parametrize("key", NOT_YET)
def test_what_is_not_there_yet_is_refused_and_not_dropped(key):
    other = {str: "powersgd", int: 7, tuple: ("x",)}[type(DEFAULTS[key])]
    other = {"SOLVER.AMP.NONFINITE": "retry_fp32"}.get(key, other)
    with pytest.raises(UserError, match=f"{key} = .* not supported in this version"):
        load_cfg(None, [key, other])


def test_settings_without_effect_are_found():
    cfg = load_cfg(None, ["SOLVER.AMP.PRECISION", "bf16", "SOLVER.AMP.SCALER.MIN_SCALE", "2.0"])
    assert unused_amp_keys(cfg) == ["SOLVER.AMP.PRECISION", "SOLVER.AMP.SCALER.MIN_SCALE"]
    cfg.SOLVER.AMP.ENABLED = True
    assert unused_amp_keys(cfg) == []
