"""What downstream code may depend on, written down: every new name, argument, field, key or option is a decision.

A failure here means that the surface changed. If that was the intention, change the table, docs/ and CHANGELOG.md too.
"""

import argparse
import dataclasses
import importlib
import inspect
import pickle

import pytest
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer

import d2amp_ext
from d2amp_ext import cli
from d2amp_ext.keys import DEFAULTS

NAMES = [
    "AMPTrainer",
    "NonFiniteError",
    "PrecisionCheckpointer",
    "PrecisionPolicy",
    "PrecisionTrainer",
    "PrecisionTrainerMixin",
    "Predictor",
    "ScalerOptions",
    "StepRecord",
    "TRAINER_REGISTRY",
    "UnknownKeyError",
    "UserError",
    "add_amp_config",
    "amp_step",
    "fp32_island",
    "install",
    "load_cfg",
    "protect",
    "uninstall",
]

SIGNATURES = {
    "add_amp_config": "(cfg)",
    "load_cfg": "(config_file=None, opts=(), *, trust=False)",
    "fp32_island": "(target)",
    "protect": "(model, policy)",
    "amp_step": "(losses, optimizer, *, policy, scaler, iteration=0, previous=None, micro_batches=1, after_backward=None, "
    "context='', retry=None)",
    "AMPTrainer": "(model, data_loader, optimizer, gather_metric_period=1, zero_grad_before_forward=False, "
    "grad_scaler=None, precision=None, log_grad_scaler=False, async_write_metrics=False, *, policy=None, accumulate_steps=1)",
    "PrecisionTrainer": "(cfg)",
    "PrecisionTrainerMixin": "(cfg)",
    "Predictor": "(cfg, trust=False)",
    "install": "(*, trust=False)",
    "uninstall": "()",
    "NonFiniteError": "(message, record)",
    "PrecisionCheckpointer": "(model, save_dir='', *, save_to_disk=None, **checkpointables)",
}

METHODS = {
    "PrecisionPolicy": {
        "from_cfg": "(cfg)",
        "from_amp_node": "(amp)",
        "from_lazy": "(amp)",
        "for_evaluation": "(cfg)",
        "resolve": "(self, device, purpose='Precision')",
        "check": "(self, device)",
        "dtype": property,
        "uses_scaler": property,
        "autocast": "(self)",
        "make_scaler": "(self)",
        "float32_switches": "(self)",
        "describe": "(self)",
    },
    "ScalerOptions": {},
    "StepRecord": {},
}

REQUIRED = dataclasses.MISSING
FIELDS = {
    "PrecisionPolicy": {
        "precision": "auto",
        "scaler": d2amp_ext.ScalerOptions(),
        "nonfinite": "skip",
        "max_consecutive_skips": 20,
        "fp32_modules": (),
        "shield": True,
        "device": None,
        "reason": "",
    },
    "ScalerOptions": {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 1.0,
        "static": 0.0,
    },
    "StepRecord": {
        "iteration": REQUIRED,
        "skipped": REQUIRED,
        "cause": REQUIRED,
        "skips": REQUIRED,
        "skips_in_row": REQUIRED,
        "losses": REQUIRED,
        "grad_norm": None,
        "scale": None,
        "retried": False,
        "retries": 0,
    },
}

KEYS = {
    "SOLVER.AMP.PRECISION": "auto",
    "SOLVER.AMP.SCALER.INIT_SCALE": 65536.0,
    "SOLVER.AMP.SCALER.GROWTH_FACTOR": 2.0,
    "SOLVER.AMP.SCALER.BACKOFF_FACTOR": 0.5,
    "SOLVER.AMP.SCALER.GROWTH_INTERVAL": 2000,
    "SOLVER.AMP.SCALER.MIN_SCALE": 1.0,
    "SOLVER.AMP.SCALER.STATIC": 0.0,
    "SOLVER.AMP.NONFINITE": "skip",
    "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS": 20,
    "SOLVER.AMP.FP32_MODULES": (),
    "SOLVER.AMP.SHIELD": True,
    "SOLVER.AMP.BUNDLE_WEIGHTS": False,
    "SOLVER.AMP.HOLD_LR_ON_SKIP": False,
    "SOLVER.AMP.TRAINER": "AMPTrainer",
    "SOLVER.AMP.COMM_HOOK": "none",
    "SOLVER.AMP.LOG_GRAD_SCALER": False,
    "SOLVER.ACCUMULATE_STEPS": 1,
    "SOLVER.OPTIMIZER": "SGD",
    "SOLVER.DDP.FIND_UNUSED_PARAMETERS": False,
    "SOLVER.DDP.STATIC_GRAPH": False,
    "SOLVER.DDP.GRADIENT_AS_BUCKET_VIEW": False,
    "SOLVER.DDP.BROADCAST_BUFFERS": False,
    "SOLVER.DDP.BUCKET_CAP_MB": 25,
    "SOLVER.CHECKPOINT_KEEP": 0,
    "SOLVER.CHECKPOINT_ON_ERROR": "continue",
    "SOLVER.OOM": "raise",
    "TEST.AMP.ENABLED": False,
    "TEST.AMP.PRECISION": "auto",
    "DATASETS.REGISTER": (),
    "DATALOADER.MAX_BAD_SAMPLES": 0,
    "FAST.LEVEL": 1,
    "FAST.DISABLE": (),
    "MONITOR.PERIOD": 20,
    "MONITOR.WRITERS": (),
}

# Command -> option or positional -> its default. `...` where it depends on the machine. All have --help and --debug.
RUN_FLAGS = {
    "--config-file": "",
    "--resume": False,
    "--eval-only": False,
    "--num-gpus": 1,
    "--num-machines": 1,
    "--machine-rank": 0,
    "--dist-url": ...,
    "--trust": False,
}
OPTIONS = {
    "train": {**RUN_FLAGS, "opts": None},
    "lazy": {**RUN_FLAGS, "opts": None},
    "run": {
        "--trust": False,
        "-m --module": False,
        "script": None,
        "args": None,
    },
    "lightning": {
        "--accelerator": "auto",
        "--devices": None,
        "--num-nodes": None,
        "--strategy": "auto",
        "--precision": None,
        **RUN_FLAGS,
        "opts": None,
    },
    "predict": {
        "images": None,
        "--config-file": None,
        "--output": None,
        "--weights": None,
        "--confidence": 0.5,
        "--json": False,
        "--trust": False,
        "--opts": [],
    },
    "replay": {
        "bundle": None,
        "--weights": None,
        "--precision": None,
        "--config-file": "",
        "--json": False,
        "--trust": False,
        "opts": None,
    },
    "audit": {
        "--config-file": "",
        "--weights": None,
        "--precision": None,
        "--images": 32,
        "--batches": 2,
        "--tolerance": 0.02,
        "--no-ap": False,
        "--no-proposal": False,
        "--json": None,
        "--trust": False,
        "opts": None,
    },
    "demo": {
        "--output": "output/demo",
        "--precision": "auto",
        "--config-file": "nuclei/faster_rcnn_R_50_FPN_narrow.yaml",
        "opts": None,
    },
    "setup": {
        "--source": "auto",
        "--dry-run": False,
        "-q --quiet": False,
        "--make-venv": None,
    },
    "doctor": {
        "--json": False,
    },
}


LIGHTNING = {
    "DataModule": "(cfg, parts=<class 'd2amp_ext.default_trainer.PrecisionTrainer'>)",
    "PolicyPrecision": "(policy, evaluation=None)",
    "TrainingModule": "(cfg, parts=<class 'd2amp_ext.default_trainer.PrecisionTrainer'>, *, trust=False)",
    "trainer_options": "(cfg, *, trust=False)",
}


def test_the_names_of_the_lightning_room():
    import d2amp_ext.lightning as room

    assert room.__all__ == sorted(LIGHTNING)
    for name, signature in LIGHTNING.items():
        assert str(inspect.signature(getattr(room, name))) == signature and getattr(room, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        room.Trainer


def test_the_list_of_names():
    assert d2amp_ext.__all__ == sorted(d2amp_ext.__all__) == NAMES
    assert set(NAMES) <= set(dir(d2amp_ext))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_loads_and_is_loaded_once(name):
    first = getattr(d2amp_ext, name)
    assert getattr(d2amp_ext, name) is first
    if inspect.isclass(first) or inspect.isfunction(first):
        assert first.__name__ == name and first.__module__.startswith("d2amp_ext.")
        assert first.__doc__ and pickle.loads(pickle.dumps(first)) is first


def test_a_star_import_gives_the_names_and_no_more():
    namespace = {}
    exec("from d2amp_ext import *", namespace)
    assert sorted(namespace.keys() - {"__builtins__"}) == NAMES


@pytest.mark.parametrize("name", ["AMPTrianer", "amptrainer", "_hidden", "load", ""])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"'d2amp_ext' has no attribute '{name}'"):
        getattr(d2amp_ext, name)
    assert not hasattr(d2amp_ext, name) and getattr(d2amp_ext, name, 3) == 3


def test_an_unknown_name_is_an_import_error_in_a_from_import():
    with pytest.raises(ImportError, match="AMPTrianer"):
        from d2amp_ext import AMPTrianer  # noqa: F401


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert str(inspect.signature(getattr(d2amp_ext, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", METHODS)
def test_public_methods(name):
    cls = getattr(d2amp_ext, name)
    fields = {field.name for field in dataclasses.fields(cls)}
    found = {name: value for name, value in vars(cls).items() if not name.startswith("_") and name not in fields}
    for attribute, value in found.items():
        is_property = isinstance(value, property)
        found[attribute] = property if is_property else str(inspect.signature(getattr(cls, attribute)))
    assert found == METHODS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_the_frozen_values(name):
    cls = getattr(d2amp_ext, name)
    assert {field.name: field.default for field in dataclasses.fields(cls)} == FIELDS[name]
    assert cls.__dataclass_params__.frozen
    assert all(f"{field} (" in cls.__doc__ for field in FIELDS[name])  # each says what it means


def test_class_relations():
    from d2amp_ext import AMPTrainer, NonFiniteError, PrecisionTrainer, PrecisionTrainerMixin, UnknownKeyError, UserError

    assert issubclass(AMPTrainer, StockAMPTrainer)
    assert issubclass(PrecisionTrainer, (PrecisionTrainerMixin,)) and issubclass(PrecisionTrainer, DefaultTrainer)
    assert not issubclass(PrecisionTrainerMixin, DefaultTrainer)
    assert issubclass(UserError, ValueError) and issubclass(UnknownKeyError, (UserError, KeyError))
    assert issubclass(NonFiniteError, FloatingPointError) and not issubclass(NonFiniteError, ValueError)


def test_our_trainer_takes_every_argument_of_the_stock_one_in_its_place():
    """New arguments of Detectron2's come to light here; ours are keywords only."""
    stock = list(inspect.signature(StockAMPTrainer).parameters.values())
    ours = list(inspect.signature(d2amp_ext.AMPTrainer).parameters.values())
    assert [p.name for p in ours][: len(stock)] == [p.name for p in stock]
    assert {p.name: p.kind for p in ours[len(stock) :]} == dict.fromkeys(("policy", "accumulate_steps"), inspect.Parameter.KEYWORD_ONLY)


def test_keys_and_defaults():
    assert DEFAULTS == KEYS and list(DEFAULTS) == list(KEYS)
    assert {key: type(value) for key, value in DEFAULTS.items()} == {key: type(value) for key, value in KEYS.items()}


def test_scaler_keys_and_fields_are_the_same():
    prefix = "SOLVER.AMP.SCALER."
    keys = {key.removeprefix(prefix).lower(): value for key, value in KEYS.items() if key.startswith(prefix)}
    assert keys == FIELDS["ScalerOptions"]


def test_the_list_of_commands():
    assert list(cli.COMMANDS) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_command(name):
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"d2amp_ext.{cli.COMMANDS[name][0]}").add_arguments(parser)
    found = {" ".join(action.option_strings) or action.dest: action for action in parser._actions}
    assert list(found) == list(OPTIONS[name])
    expected = {option: default for option, default in OPTIONS[name].items() if default is not ...}
    assert {option: found[option].default for option in expected} == expected
    assert all(action.help for action in found.values())


@pytest.mark.parametrize("name", ["train", "lazy"])
def test_training_commands_take_the_flags_of_detectron2(name):
    from detectron2.engine import default_argument_parser

    stock = {option for action in default_argument_parser()._actions for option in action.option_strings}
    assert stock - {"-h", "--help"} <= set(OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_every_command_has_debug_and_help(name, capsys):
    assert cli.run_command(name, ["--help"]) == 0
    text = capsys.readouterr().out
    flags = [option.split()[-1] for option in OPTIONS[name] if option.startswith("-")]
    assert all(flag in text for flag in ["--debug", "--help", *flags])
