"""The Trainer that follows from a config and flags, and what Lightning refuses."""

import logging

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from d2amp_ext import UserError, load_cfg
from d2amp_ext.lightning import PolicyPrecision, trainer_options
from d2amp_ext.lightning.options import build_trainer

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def config(*opts):
    return load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu", *opts])


ON = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION"]


@pytest.mark.parametrize(
    "opts, name", [([], "32-true"), ([*ON, "fp32"], "32-true"), ([*ON, "fp16"], "16-mixed"), ([*ON, "bf16"], "bf16-mixed")]
)
def test_the_config_decides_the_precision(opts, name):
    trainer = build_trainer(config(*opts))
    assert trainer.precision == name and isinstance(trainer.precision_plugin, PolicyPrecision) == bool(opts)


def test_steps_and_accumulation_are_those_of_the_config():
    trainer = build_trainer(config(*ON, "fp32", "SOLVER.MAX_ITER", "7", "SOLVER.ACCUMULATE_STEPS", "3"))
    assert (trainer.max_steps, trainer.max_epochs, trainer.accumulate_grad_batches) == (7, -1, 3)
    assert trainer.gradient_clip_val is None  # Detectron2's optimizers clip
    assert not trainer.loggers and not trainer.checkpoint_callbacks


def test_nothing_is_said_about_hardware_that_is_not_there_and_services(capfd, caplog, recwarn):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    build_trainer(config(*ON, "fp16"))
    said = "".join(capfd.readouterr()) + caplog.text
    assert "TPU" not in said and "Tip" not in said and not [w for w in recwarn if "lightning" in w.filename]


@pytest.mark.parametrize("name", ["bf16-true", "16-true", "64-true"])
def test_precisions_past_the_policy_are_lightnings(name):
    assert build_trainer(config(), precision=name).precision == name


@pytest.mark.parametrize("name", [name for name in StrategyRegistry if name.startswith("ddp")])
def test_every_ddp_strategy_takes_the_processes_that_are_there(name):
    cfg = config("SOLVER.DDP.BUCKET_CAP_MB", "3")
    trainer = build_trainer(cfg, strategy=name)
    strategy = trainer.strategy
    assert type(strategy) is DDPStrategy and strategy.cluster_environment.creates_processes_externally
    assert strategy._start_method == "popen" and strategy._ddp_kwargs["bucket_cap_mb"] == 3
    assert strategy._ddp_kwargs["broadcast_buffers"] is False
    assert strategy._ddp_kwargs["find_unused_parameters"] == ("true" in name)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"strategy": "dpp"}, ["--strategy dpp", "ddp_spawn", "Did you mean ddp?"]),
        ({"strategy": "fsdp"}, ["--strategy fsdp", "policy of SOLVER.AMP", "bf16-true"]),
        ({"strategy": "deepspeed_stage_2"}, ["--strategy deepspeed_stage_2", "policy of SOLVER.AMP"]),
        ({"strategy": "xla"}, ["--strategy xla", "policy of SOLVER.AMP"]),
        ({"accelerator": "quantum"}, ["--accelerator quantum", "cpu"]),
    ],
)
def test_mistakes(flags, words):
    with pytest.raises(UserError) as caught:
        build_trainer(config(*ON, "bf16"), **flags)
    assert all(word in str(caught.value) for word in words)


@no_gpu
@pytest.mark.parametrize(
    "flags, words",
    [
        ({"accelerator": "gpu"}, ["--accelerator gpu", "No supported gpu backend"]),
        ({"accelerator": "cuda"}, ["--accelerator cuda", "not available"]),
        ({"accelerator": "tpu"}, ["--accelerator tpu", "torch_xla"]),
        ({"strategy": "fsdp", "precision": "bf16-true"}, ["--strategy fsdp", "requires a GPU"]),
        ({"strategy": "deepspeed"}, ["--strategy deepspeed", "pip install"]),
        ({"precision": "transformer-engine"}, ["--precision transformer-engine", "transformer_engine"]),
        ({"precision": "transformer-engine-float16"}, ["--precision transformer-engine-float16", "transformer_engine"]),
    ],
)
def test_hardware_and_packages_that_are_not_there(flags, words):
    with pytest.raises(UserError) as caught:
        build_trainer(config(), **flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_options_can_be_changed_by_who_makes_the_trainer():
    import lightning

    options = trainer_options(config(*ON, "bf16"))
    trainer = lightning.Trainer(**{**options, "max_steps": 3}, accelerator="cpu", devices=1)
    assert trainer.max_steps == 3 and trainer.precision == "bf16-mixed"
