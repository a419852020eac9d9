import dataclasses
import logging

import pytest
import torch

from d2amp_ext import PrecisionPolicy, ScalerOptions, UnknownKeyError, UserError, load_cfg, policy
from d2amp_ext.policy import SPELLINGS, parse_precision

SPELT = {
    "fp16": ["fp16", "float16", "half", "16", "16-mixed", "FP16", " Half ", 16, torch.float16],
    "bf16": ["bf16", "bfloat16", "bf16-mixed", "BFloat16", torch.bfloat16],
    "fp32": ["fp32", "float32", "32", "32-true", "no", "NO", 32, False, torch.float32],
    "tf32": ["tf32", "TF32"],
    "auto": ["auto", "Auto"],
}


@pytest.fixture
def device(monkeypatch):
    """Lets a test say what the hardware can do."""

    def pretend(native, runnable=("fp16", "bf16")):
        answer = frozenset(native), frozenset(runnable) | frozenset(native)
        monkeypatch.setattr(policy._compat, "native_precisions", lambda *args: answer)
        policy.warn_once.cache_clear()

    return pretend


@pytest.mark.parametrize("name, value", [(name, value) for name, values in SPELT.items() for value in values])
def test_every_spelling(name, value):
    assert parse_precision(value) == name


@pytest.mark.parametrize("value", ["fp17", "bf-16", "64", "", "None", 8, True, "16-true", torch.float64])
def test_other_spellings_are_errors_that_name_key_value_and_choices(value):
    with pytest.raises(UserError) as error:
        parse_precision(value)
    text = str(error.value)
    assert "SOLVER.AMP.PRECISION" in text and repr(value) in text
    assert all(name in text for name in SPELLINGS)


def test_the_nearest_match_is_named():
    with pytest.raises(UserError, match="Did you mean 'bfloat16'"):
        parse_precision("bfloat61")


@pytest.mark.parametrize(
    "native, kind, chosen",
    [
        ({"fp16", "bf16"}, "cuda", "bf16"),
        ({"fp16"}, "cuda", "fp16"),
        (set(), "cuda", "fp32"),
        ({"bf16"}, "cpu", "bf16"),
        ({"fp16"}, "cpu", "fp32"),
        (set(), "cpu", "fp32"),
    ],
)
def test_auto_takes_the_best_native_precision_and_says_why(device, caplog, native, kind, chosen):
    device(native)
    with caplog.at_level(logging.INFO):
        resolved = PrecisionPolicy().resolve(kind)
    assert resolved.precision == chosen and resolved.reason.startswith("auto: ")
    assert sum(resolved.reason in record.getMessage() for record in caplog.records) == 1


def test_an_emulated_choice_runs_with_one_warning(device, caplog):
    device(native=())
    for _ in range(2):
        assert PrecisionPolicy("bf16").resolve("cpu").precision == "bf16"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "slower" in warnings[0] and "fp32" in warnings[0]


def test_an_impossible_choice_is_an_error_that_says_what_to_choose(device):
    device(native={"fp16"}, runnable=())
    with pytest.raises(UserError, match="SOLVER.AMP.PRECISION.*bf16.*cannot run it. Choose fp16"):
        PrecisionPolicy("bf16").resolve("cuda")


def test_tf32_without_tf32_is_fp32_with_one_warning(device, caplog):
    device(native=())
    resolved = PrecisionPolicy("tf32").resolve("cpu")
    assert resolved.precision == "tf32" and resolved.dtype is torch.float32
    assert sum("no TF32" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("precision, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_autocast_and_scaler_follow_the_precision(precision, dtype):
    resolved = PrecisionPolicy(precision).resolve("cpu")
    assert resolved.dtype is dtype
    with resolved.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    assert resolved.make_scaler().is_enabled() == (precision == "fp16")


def test_fp32_turns_an_outer_autocast_off():
    with torch.autocast("cpu", dtype=torch.bfloat16), PrecisionPolicy("fp32").resolve("cpu").autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("use", [lambda p: p.autocast(), lambda p: p.make_scaler(), lambda p: p.dtype])
@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_an_unresolved_policy_refuses_to_work(use, precision):
    with pytest.raises(RuntimeError, match="not resolved"):
        use(PrecisionPolicy(precision))


def test_off_does_nothing():
    off = PrecisionPolicy.from_cfg(load_cfg())
    assert off.precision == "off" and off.dtype is None and not off.make_scaler().is_enabled() if off.device else True
    resolved = off.resolve("cpu")
    assert not resolved.make_scaler().is_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16), resolved.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16  # even an outer autocast stays


def test_resolving_leaves_the_original_and_twice_is_the_same():
    unresolved = PrecisionPolicy()
    resolved = unresolved.resolve("cpu")
    assert unresolved.device is None and resolved.device == "cpu"
    assert resolved.resolve("cpu") == resolved
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.precision = "fp16"


@pytest.mark.parametrize(
    "options, key",
    [
        ({"growth_factor": 1.0}, "GROWTH_FACTOR"),
        ({"backoff_factor": 1.0}, "BACKOFF_FACTOR"),
        ({"growth_interval": 0}, "GROWTH_INTERVAL"),
        ({"min_scale": 0.0}, "MIN_SCALE"),
        ({"init_scale": 0.5}, "INIT_SCALE"),
        ({"init_scale": float("inf")}, "INIT_SCALE"),
        ({"static": -1.0}, "STATIC"),
    ],
)
def test_scaler_options_that_cannot_work(options, key):
    with pytest.raises(ValueError, match=f"SOLVER.AMP.SCALER.{key}"):
        ScalerOptions(**options)


def test_defaults_are_those_of_torch():
    state = torch.amp.GradScaler("cpu").state_dict()
    options = ScalerOptions()
    assert options.init_scale == state["scale"]
    assert all(getattr(options, name) == state[name] for name in ("growth_factor", "backoff_factor", "growth_interval"))


def test_from_lazy():
    made = PrecisionPolicy.from_lazy({"enabled": True, "precision": "float16", "scaler": {"init_scale": 4.0}})
    assert made == PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=4.0))
    assert PrecisionPolicy.from_lazy({"enabled": False}).precision == "off"


@pytest.mark.parametrize("node, near", [({"enable": True}, "enabled"), ({"enabled": True, "precison": "fp16"}, "precision")])
def test_from_lazy_refuses_unknown_names(node, near):
    with pytest.raises(UnknownKeyError, match=f"Did you mean train.amp.{near}"):
        PrecisionPolicy.from_lazy(node)


@pytest.mark.parametrize("precision, matmul", [("fp32", "highest"), ("tf32", None), ("bf16", "medium")])
def test_float32_switches_are_set_and_put_back(precision, matmul):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    try:
        with PrecisionPolicy(precision).resolve("cpu").float32_switches():
            if matmul:
                assert torch.get_float32_matmul_precision() == matmul
            if precision == "fp32":
                assert not torch.backends.cudnn.allow_tf32
            assert isinstance(torch.backends.cuda.matmul.allow_tf32, bool)  # every getter stays readable
            assert isinstance(torch.backends.cudnn.conv.fp32_precision, str)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32 == before[1]
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_tf32_turns_tf32_on_where_it_is_native(device):
    device(native={"tf32", "fp16", "bf16"})
    resolved = PrecisionPolicy("tf32").resolve("cpu")
    with resolved.float32_switches():
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("precision", ["off", "auto", "fp32", "tf32", "fp16", "bf16"])
def test_describe_is_one_line_that_names_the_precision(precision):
    text = PrecisionPolicy(precision).describe()
    assert "\n" not in text and precision in text
