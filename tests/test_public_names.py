"""The surface that other people's code stands on. A change here is a decision, and an entry in CHANGELOG.md."""

import argparse
import dataclasses
import importlib
import inspect

import pytest

import d2amp_ext
from d2amp_ext import cli
from d2amp_ext.keys import DEFAULTS

NAMES = {
    "AMPTrainer", "NonFiniteError", "PrecisionCheckpointer", "PrecisionPolicy", "PrecisionTrainer",
    "PrecisionTrainerMixin", "Predictor", "ScalerOptions", "StepRecord", "TRAINER_REGISTRY", "UnknownKeyError",
    "UserError", "add_amp_config", "amp_step", "load_cfg",
}  # fmt: skip

SIGNATURES = {
    "add_amp_config": "(cfg)",
    "load_cfg": "(config_file=None, opts=(), *, trust=False)",
    "amp_step": "(losses, optimizer, *, policy, scaler, iteration=0, previous=None, micro_batches=1, "
    "after_backward=None, context='')",
    "AMPTrainer": "(model, data_loader, optimizer, gather_metric_period=1, zero_grad_before_forward=False, "
    "grad_scaler=None, precision=None, log_grad_scaler=False, async_write_metrics=False, *, policy=None, "
    "accumulate_steps=1)",
    "PrecisionTrainer": "(cfg)",
    "Predictor": "(cfg, trust=False)",
}

FIELDS = {
    "PrecisionPolicy": ["precision", "scaler", "nonfinite", "max_consecutive_skips", "fp32_modules", "shield", "device", "reason"],
    "ScalerOptions": ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "static"],
    "StepRecord": ["iteration", "skipped", "cause", "skips", "skips_in_row", "losses", "grad_norm", "scale"],
}  # fmt: skip

KEYS = {
    "SOLVER.AMP.PRECISION": "auto", "SOLVER.AMP.SCALER.INIT_SCALE": 65536.0, "SOLVER.AMP.SCALER.GROWTH_FACTOR": 2.0,
    "SOLVER.AMP.SCALER.BACKOFF_FACTOR": 0.5, "SOLVER.AMP.SCALER.GROWTH_INTERVAL": 2000,
    "SOLVER.AMP.SCALER.MIN_SCALE": 1.0, "SOLVER.AMP.SCALER.STATIC": 0.0, "SOLVER.AMP.NONFINITE": "skip",
    "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS": 20, "SOLVER.AMP.FP32_MODULES": (), "SOLVER.AMP.SHIELD": True,
    "SOLVER.AMP.HOLD_LR_ON_SKIP": False, "SOLVER.AMP.TRAINER": "AMPTrainer", "SOLVER.AMP.COMM_HOOK": "none",
    "SOLVER.AMP.LOG_GRAD_SCALER": False, "SOLVER.ACCUMULATE_STEPS": 1, "SOLVER.OPTIMIZER": "SGD",
    "SOLVER.DDP.FIND_UNUSED_PARAMETERS": False, "SOLVER.DDP.STATIC_GRAPH": False,
    "SOLVER.DDP.GRADIENT_AS_BUCKET_VIEW": False, "SOLVER.DDP.BROADCAST_BUFFERS": False, "SOLVER.DDP.BUCKET_CAP_MB": 25,
    "SOLVER.CHECKPOINT_KEEP": 0, "SOLVER.CHECKPOINT_ON_ERROR": "continue", "SOLVER.OOM": "raise",
    "TEST.AMP.ENABLED": False, "TEST.AMP.PRECISION": "auto", "DATASETS.REGISTER": (), "DATALOADER.MAX_BAD_SAMPLES": 0,
    "FAST.LEVEL": 1, "FAST.DISABLE": (), "MONITOR.PERIOD": 20, "MONITOR.WRITERS": (),
}  # fmt: skip

OPTIONS = {
    "train": ["--config-file", "--debug", "--dist-url", "--eval-only", "--help", "--machine-rank", "--num-gpus",
              "--num-machines", "--resume", "--trust", "opts"],
    "predict": ["--confidence", "--config-file", "--debug", "--help", "--json", "--opts", "--output", "--trust", "--weights",
                "images"],
    "demo": ["--config-file", "--debug", "--help", "--output", "--precision", "opts"],
    "setup": ["--debug", "--dry-run", "--help", "--make-venv", "--quiet", "--source"],
}  # fmt: skip


def test_the_names():
    assert set(d2amp_ext.__all__) == NAMES
    assert all(getattr(d2amp_ext, name).__module__.startswith("d2amp_ext") for name in NAMES - {"TRAINER_REGISTRY"})
    assert NAMES <= set(dir(d2amp_ext))


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="AMPTrainr"):
        d2amp_ext.AMPTrainr


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert str(inspect.signature(getattr(d2amp_ext, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    kind = getattr(d2amp_ext, name)
    assert [field.name for field in dataclasses.fields(kind)] == FIELDS[name]
    assert kind.__dataclass_params__.frozen


def test_the_keys_and_their_defaults():
    assert DEFAULTS == KEYS


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_every_command(command):
    assert set(OPTIONS) == set(cli.COMMANDS)
    module = importlib.import_module(f"d2amp_ext.{cli.COMMANDS[command][0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--debug", action="store_true")
    module.add_arguments(parser)
    found = {max(action.option_strings, key=len) if action.option_strings else action.dest for action in parser._actions}
    assert sorted(found) == sorted(OPTIONS[command])


def test_errors_are_what_callers_catch():
    assert issubclass(d2amp_ext.UserError, ValueError)
    assert issubclass(d2amp_ext.UnknownKeyError, (ValueError, KeyError)) and issubclass(d2amp_ext.UnknownKeyError, KeyError)
    assert issubclass(d2amp_ext.NonFiniteError, FloatingPointError)
