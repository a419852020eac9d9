"""--precision in Lightning's words, and ours."""

import logging
from typing import get_args

import pytest

from d2amp_ext import PrecisionPolicy, UserError, load_cfg
from d2amp_ext.lightning.names import OWN_PRECISION, PAST_THE_POLICY, SHOWN, apply_precision, leave_to_strategy


def lightnings_names():
    from lightning.fabric import connector

    kinds = ("_PRECISION_INPUT_STR", "_PRECISION_INPUT_INT", "_PRECISION_INPUT_STR_ALIAS")
    return [name for kind in kinds for name in get_args(getattr(connector, kind))]


def test_every_name_that_lightning_knows_is_taken_and_means_the_same():
    from lightning.fabric.connector import _convert_precision_to_unified_args

    names = lightnings_names()
    assert {"16", "bf16", "32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "transformer-engine"} <= set(names)
    for name in names:
        cfg = load_cfg()
        past = apply_precision(cfg, name)
        in_full = _convert_precision_to_unified_args(name)
        assert in_full == (past or SHOWN[cfg.SOLVER.AMP.PRECISION]), name
        assert cfg.SOLVER.AMP.ENABLED is (past is None)


@pytest.mark.parametrize("spelt, precision", [("auto", "auto"), ("TF32", "tf32"), ("float16", "fp16"), ("no", "fp32")])
def test_our_own_names_are_taken_too_and_it_says_what_it_set(caplog, spelt, precision):
    cfg = load_cfg()
    with caplog.at_level(logging.INFO):
        assert apply_precision(cfg, spelt) is None
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.PRECISION) == (True, precision)
    assert f"--precision {spelt} set SOLVER.AMP.ENABLED True" in caplog.text and SHOWN[precision] in caplog.text


def test_none_changes_nothing(caplog):
    cfg = load_cfg(None, ["SOLVER.AMP.PRECISION", "bf16"])
    assert apply_precision(cfg, None) is None
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.PRECISION) == (False, "bf16") and not caplog.text


@pytest.mark.parametrize("name", ["fp16", "16-mixed", "64", "bf16-true", "auto"])
def test_against_an_explicit_precision_it_names_both(name):
    cfg = load_cfg(None, ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bfloat16"])
    with pytest.raises(UserError, match=f"--precision {name} contradicts SOLVER.AMP.PRECISION = 'bfloat16'"):
        apply_precision(cfg, name)


def test_saying_the_same_twice_is_fine(caplog):
    cfg = load_cfg(None, ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16"])
    with caplog.at_level(logging.INFO):
        assert apply_precision(cfg, "bf16-mixed") is None
    assert "is what the config says" in caplog.text


@pytest.mark.parametrize("name", PAST_THE_POLICY)
def test_what_goes_past_the_policy_says_so(caplog, name):
    cfg = load_cfg(None, ["SOLVER.AMP.ENABLED", "True"])
    assert apply_precision(cfg, name) == PAST_THE_POLICY[name]
    assert not cfg.SOLVER.AMP.ENABLED
    assert "goes past our policy" in caplog.text and "set SOLVER.AMP.ENABLED False" in caplog.text


def test_an_unknown_name_gets_the_list_and_the_nearest():
    with pytest.raises(UserError, match="--precision 16-mixd is no precision.*tf32.*transformer-engine.*Did you mean '16-mixed'"):
        apply_precision(load_cfg(), "16-mixd")


@pytest.mark.parametrize("precision, shown", [("bf16", "bf16-mixed"), ("16", "16-mixed"), ("fp32", "32-true")])
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "FSDP"])
def test_a_strategy_with_a_precision_of_its_own_computes_in_what_the_config_says(caplog, strategy, precision, shown):
    cfg = load_cfg(opts=["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision])
    assert leave_to_strategy(cfg, strategy, PrecisionPolicy.from_cfg(cfg)) == shown
    assert not cfg.SOLVER.AMP.ENABLED and f"--strategy {strategy}" in caplog.text and shown in caplog.text
    assert leave_to_strategy(cfg, strategy, PrecisionPolicy.from_cfg(cfg)) is None  # AMP is off


def test_all_other_strategies_take_the_policy(caplog):
    from lightning.pytorch.strategies import StrategyRegistry

    cfg = load_cfg(opts=["SOLVER.AMP.ENABLED", "True"])
    others = [name for name in ("auto", *StrategyRegistry) if not name.startswith(OWN_PRECISION)]
    assert "ddp" in others and "single_device" in others
    assert {leave_to_strategy(cfg, name, PrecisionPolicy.from_cfg(cfg)) for name in others} == {None}
    assert cfg.SOLVER.AMP.ENABLED and not caplog.text
