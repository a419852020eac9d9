"""TrainingModule on the micro recipe: the bits of PrecisionTrainer, resumes, hooks, loggers."""

import json
import os

import lightning
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.utils.env import seed_all_rng
from lightning.pytorch.loggers import CSVLogger

from d2amp_ext import PrecisionTrainer, UserError, load_cfg
from d2amp_ext.data.register import register_datasets
from d2amp_ext.lightning import DataModule, PolicyPrecision, TrainingModule, trainer_options

ON = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION"]
QUIET = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


@pytest.fixture(autouse=True)
def _datasets(datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))


def config(folder, *opts, steps=6):
    os.makedirs(folder, exist_ok=True)
    base = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), "SEED", "3", "SOLVER.MAX_ITER", str(steps),
            "SOLVER.AMP.ENABLED", "False", "MONITOR.PERIOD", "1", "TEST.EVAL_PERIOD", "0"]  # fmt: skip
    return load_cfg("quick/faster_rcnn_micro.yaml", [*base, *opts])


class Quiet(PrecisionTrainer):
    """No evaluation, which most of these tests do not need."""

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}


def train(cfg, parts=Quiet, resume=False, hooks=(), module_class=TrainingModule, data=None, **options):
    seed_all_rng(cfg.SEED)
    module = module_class(cfg, parts)
    module.register_hooks(list(hooks))
    trainer = lightning.Trainer(**{**trainer_options(cfg), **QUIET, **options})
    path = os.path.join(cfg.OUTPUT_DIR, "last.ckpt") if resume else None
    trainer.fit(module, datamodule=data or DataModule(cfg, parts), ckpt_path=path)
    return module


def train_stock(cfg, parts=Quiet):
    seed_all_rng(cfg.SEED)
    trainer = parts(cfg)
    trainer.resume_or_load(False)
    trainer.train()
    return trainer


def losses(loop):
    return loop.storage.history("total_loss").values()


def same_weights(a, b):
    first, second = a.model.state_dict(), b.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def lines_of(folder):
    text = open(os.path.join(folder, "metrics.json")).read()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.mark.parametrize("opts", [[], [*ON, "fp32"], [*ON, "bf16"]], ids=["off", "fp32", "bf16"])
def test_twenty_steps_have_the_bits_of_train_net(tmp_path, opts):
    """The same losses, learning rates and weights, in the same lines of metrics.json."""
    theirs = train_stock(config(tmp_path / "a", *opts, steps=20))
    ours = train(config(tmp_path / "b", *opts, steps=20))
    assert losses(ours.loop) == losses(theirs) and len(losses(theirs)) == 20
    assert ours.loop.storage.history("lr").values() == theirs.storage.history("lr").values()
    assert same_weights(ours, theirs)
    clocks = ("time", "data_time", "rank_data_time", "eta_seconds", "memory/", "speed/")
    a, b = ([{k: v for k, v in line.items() if not k.startswith(clocks)} for line in lines_of(tmp_path / n)] for n in "ab")
    assert a == b and a[0]["iteration"] == 19
    assert (ours.last_step is None) == (opts == [])


@pytest.mark.parametrize(
    "opts",
    [
        [*ON, "bf16", "SOLVER.ACCUMULATE_STEPS", "2", "TEST.EVAL_PERIOD", "3"],
        [*ON, "fp32", "SOLVER.OPTIMIZER", "ADAMW", "SOLVER.BASE_LR", "1e-3", "SOLVER.CLIP_GRADIENTS.ENABLED", "True",
         "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.01",
         "SOLVER.CLIP_GRADIENTS.NORM_TYPE", "2.0"],
    ],
)  # fmt: skip
def test_accumulation_clipping_evaluation_and_other_optimizers(tmp_path, opts):
    theirs = train_stock(config(tmp_path / "a", *opts, steps=4), PrecisionTrainer)
    ours = train(config(tmp_path / "b", *opts, steps=4), PrecisionTrainer)
    assert losses(ours.loop) == losses(theirs) and len(losses(theirs)) == 4 and same_weights(ours, theirs)
    assert dict(ours.last_results["bbox"]) == pytest.approx(dict(theirs._last_eval_results["bbox"]), nan_ok=True, abs=0)
    names = [name for name in theirs.storage.histories() if name.startswith("bbox/")]
    assert names and all(
        ours.loop.storage.history(name).values() == theirs.storage.history(name).values() for name in names
    )


class StopAt(HookBase):
    def __init__(self, step):
        self.step = step

    def after_step(self):
        if self.trainer.iter + 1 == self.step:
            raise RuntimeError("stopped on purpose")


def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    """With an evaluation, which draws random numbers, at the checkpoint."""
    opts = [*ON, "bf16", "SOLVER.ACCUMULATE_STEPS", "2", "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"]
    whole = train(config(tmp_path / "a", *opts), PrecisionTrainer)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(config(tmp_path / "b", *opts), PrecisionTrainer, hooks=[StopAt(5)])
    resumed = train(config(tmp_path / "b", *opts), PrecisionTrainer, resume=True)
    assert resumed.loop.start_iter == 3 and resumed.last_step.iteration == 5
    assert losses(resumed.loop) == [(value, i) for value, i in losses(whole.loop) if i >= 3]
    assert resumed.loop.storage.history("lr").values() == whole.loop.storage.history("lr").values()[3:]
    assert same_weights(whole, resumed)
    assert [line["iteration"] for line in lines_of(tmp_path / "b") if "total_loss" in line][-1] == 5
    assert resumed.trainer.global_step == 6


def test_a_run_killed_between_checkpoint_and_evaluation_evaluates_first(tmp_path):
    class DiesInEvaluation(PrecisionTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            raise RuntimeError("died in evaluation")

    opts = [*ON, "fp32", "SOLVER.CHECKPOINT_PERIOD", "2", "TEST.EVAL_PERIOD", "2"]
    whole = train(config(tmp_path / "a", *opts, steps=4), PrecisionTrainer)
    with pytest.raises(RuntimeError, match="died"):
        train(config(tmp_path / "b", *opts, steps=4), DiesInEvaluation)
    resumed = train(config(tmp_path / "b", *opts, steps=4), PrecisionTrainer, resume=True)
    assert same_weights(whole, resumed)


def test_both_checkpoints_are_plain_and_stock_goes_on_from_the_final_one(tmp_path):
    ours = train(config(tmp_path, *ON, "fp32", "SOLVER.CHECKPOINT_PERIOD", "2", steps=4))
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert last["global_step"] == 4 and last["detectron2"]["iteration"] == 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith("model_0") or "tmp" in name]
    cfg = config(tmp_path, steps=5)
    register_datasets(cfg)
    stock = type("Stock", (DefaultTrainer,), {"test": classmethod(lambda *args: {})})(cfg)
    DetectionCheckpointer(stock.model, trainer=stock).load(str(tmp_path / "model_final.pth"))
    assert stock.iter == 3 and same_weights(stock, ours)
    momentum = [state["momentum_buffer"] for state in stock.optimizer.state_dict()["state"].values()]
    expected = [state["momentum_buffer"] for state in ours.loop.optimizer.state_dict()["state"].values()]
    assert momentum and all(torch.equal(*pair) for pair in zip(momentum, expected))


def test_skips_are_counted_and_the_rate_waits(tmp_path):
    class Spoil(HookBase):
        def after_backward(self):
            if self.trainer.iter in (1, 2):
                next(p for p in self.trainer.model.parameters() if p.grad is not None).grad.fill_(float("inf"))

    class Raising(Quiet):
        @classmethod
        def build_model(cls, cfg):
            model = super().build_model(cfg)
            model.calls = 0

            def count(module, inputs):
                model.calls += 1
                if model.calls == 4:
                    raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")

            model.register_forward_pre_hook(count)
            return model

    opts = [*ON, "fp32", "SOLVER.AMP.HOLD_LR_ON_SKIP", "True", "SOLVER.WARMUP_METHOD", "linear", "SOLVER.WARMUP_ITERS", "10"]
    causes = []

    class Note(HookBase):
        def after_step(self):
            causes.append(self.trainer.last_step.cause)

    module = train(config(tmp_path, *opts, steps=5), Raising, hooks=[Spoil(), Note()])
    assert causes == [None, "gradient", "gradient", "forward", None] and module.last_step.skips == 3
    rates = [value for value, _ in module.loop.storage.history("lr").values()]
    assert rates[1] == rates[2] == rates[3] == rates[4] > rates[0]
    assert [i for _, i in losses(module.loop)] == [0, 1, 2, 4]


def test_giving_up_names_the_rate_and_the_images_and_keeps_what_was_written(tmp_path):
    class Spoil(HookBase):
        def after_backward(self):
            next(p for p in self.trainer.model.parameters() if p.grad is not None).grad.fill_(float("nan"))

    opts = [*ON, "bf16", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "1"]
    with pytest.raises(FloatingPointError, match=r"MAX_CONSECUTIVE_SKIPS = 1.*Learning rate .*Images: .*\.png"):
        train(config(tmp_path, *opts), hooks=[Spoil()])
    assert any("total_loss" in line for line in lines_of(tmp_path))


def test_off_stops_at_a_loss_that_is_not_finite_as_stock_does(tmp_path):
    cfg = config(tmp_path, "SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0")
    with pytest.raises(FloatingPointError):
        train(cfg)


def test_loggers_and_callbacks_of_lightning_have_every_scalar_once(tmp_path):
    cfg = config(tmp_path, *ON, "fp32", "SOLVER.AMP.LOG_GRAD_SCALER", "True", steps=2)
    module = train(cfg, PrecisionTrainer, logger=CSVLogger(tmp_path / "logger", name="", version=""))
    rows = (tmp_path / "logger" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    table = [dict(zip(names, row.split(","))) for row in rows[1:]]
    assert len([row for row in table if row["total_loss"]]) == 1 and table[0]["step"] == "1"
    assert {"lr", "loss_cls", "data_time", "bbox/AP", "[metric]grad_scaler"} <= set(names)
    assert len([row for row in table if row["bbox/AP"]]) == 1
    assert module.trainer.callback_metrics["total_loss"] == pytest.approx(losses(module.loop)[-1][0])


def test_validate_gives_the_figures_of_training(tmp_path):
    cfg = config(tmp_path, *ON, "fp32", "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16", steps=2)
    module = train(cfg, PrecisionTrainer)
    for weights, plugins in [("last.ckpt", True), ("model_final.pth", False)]:
        cfg.MODEL.WEIGHTS = str(tmp_path / weights)
        options = trainer_options(cfg)
        if not plugins:  # TEST.AMP holds without the plugin, too
            options.pop("plugins")
        alone = TrainingModule(cfg)
        results = lightning.Trainer(**options, **QUIET).validate(alone, datamodule=DataModule(cfg), verbose=False)
        assert dict(alone.last_results["bbox"]) == pytest.approx(dict(module.last_results["bbox"]), nan_ok=True, abs=0)
        assert results[0]["bbox/AP"] == pytest.approx(module.last_results["bbox"]["AP"])


def test_a_subclass_may_change_its_parts(tmp_path):
    class Mine(TrainingModule):
        def configure_optimizers(self):
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
            return self.optimizer

        def training_step(self, batch, batch_idx):
            return 0.5 * super().training_step(batch, batch_idx)

    class Few(list):
        pass

    class MyData(DataModule):
        def train_dataloader(self):
            return Few(batch for batch, _ in zip(super().train_dataloader(), range(4)))

    cfg = config(tmp_path, *ON, "fp32", steps=2)
    module = train(cfg, module_class=Mine, data=MyData(cfg))
    assert type(module.loop.optimizer) is torch.optim.Adam and module.last_step.iteration == 1


def test_amp_without_the_plugin_is_a_mistake(tmp_path):
    cfg = config(tmp_path, *ON, "bf16")
    with pytest.raises(UserError, match="SOLVER.AMP.ENABLED is True, but this Trainer's precision is 32-true.*trainer_options"):
        lightning.Trainer(max_steps=1, **QUIET, logger=False).fit(TrainingModule(cfg), datamodule=DataModule(cfg))


def test_a_trainer_of_the_registry_with_steps_of_its_own_is_a_mistake(tmp_path):
    from d2amp_ext import TRAINER_REGISTRY, AMPTrainer

    TRAINER_REGISTRY.register()(type("OwnSteps", (AMPTrainer,), {}))
    try:
        with pytest.raises(UserError, match="SOLVER.AMP.TRAINER = 'OwnSteps'"):
            train(config(tmp_path, *ON, "fp32", "SOLVER.AMP.TRAINER", "OwnSteps"))
    finally:
        TRAINER_REGISTRY._obj_map.pop("OwnSteps")


def test_the_plugin_and_the_storage_are_there_in_a_step(tmp_path):
    """A model of Detectron2 asks for an EventStorage whenever it is called in training mode."""
    from detectron2.utils.events import get_event_storage

    class Looking(TrainingModule):
        def training_step(self, batch, batch_idx):
            assert get_event_storage() is self.loop.storage and self.loop.storage.iter == batch_idx
            return super().training_step(batch, batch_idx)

    module = train(config(tmp_path, *ON, "bf16", steps=2), module_class=Looking)
    assert isinstance(module.precision_plugin, PolicyPrecision)
    with pytest.raises(AssertionError):
        get_event_storage()


class SpoilOnce(HookBase):
    """Makes the gradients of some iterations infinite, the first time they are there."""

    def __init__(self, *iterations):
        self.iterations = list(iterations)

    def after_backward(self):
        if self.trainer.iter in self.iterations:
            self.iterations.remove(self.trainer.iter)
            next(p for p in self.trainer.model.parameters() if p.grad is not None).grad.fill_(float("inf"))


@pytest.mark.parametrize("window", ["1", "2"])
def test_a_step_made_again_in_fp32_has_the_bits_of_train_net(tmp_path, window):
    opts = [*ON, "bf16", "SOLVER.AMP.NONFINITE", "retry_fp32", "SOLVER.ACCUMULATE_STEPS", window]

    class Spoiled(Quiet):
        def build_hooks(self):
            return [SpoilOnce(1), *super().build_hooks()]

    theirs = train_stock(config(tmp_path / "a", *opts, steps=3), Spoiled)
    ours = train(config(tmp_path / "b", *opts, steps=3), Spoiled)
    assert theirs.last_step.retries == ours.last_step.retries == 1 and ours.last_step.skips == 0
    assert losses(ours.loop) == losses(theirs) and same_weights(ours, theirs)
