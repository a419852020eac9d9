"""PrecisionTrainer on the micro recipe: off is off, resumes are exact, mixins keep their own parts."""

import json
import logging
import math
import os
import weakref

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import build_detection_train_loader
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer, hooks
from detectron2.utils.env import seed_all_rng

from d2amp_ext import AMPTrainer, PrecisionTrainer, PrecisionTrainerMixin, TRAINER_REGISTRY, UserError, load_cfg

ON = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION"]


@pytest.fixture(autouse=True)
def _datasets(datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))


def config(folder, *opts, steps=6):
    os.makedirs(folder, exist_ok=True)
    base = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), "SEED", "3", "SOLVER.MAX_ITER", str(steps),
            "SOLVER.AMP.ENABLED", "False", "MONITOR.PERIOD", "1", "TEST.EVAL_PERIOD", "0"]  # fmt: skip
    return load_cfg("quick/faster_rcnn_micro.yaml", [*base, *opts])


class Quiet:
    """No evaluation, which most of these tests do not need."""

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}


class Ours(Quiet, PrecisionTrainer):
    pass


class Stock(Quiet, DefaultTrainer):
    pass


def run(cls, cfg, resume=False, extra_hooks=()):
    seed_all_rng(cfg.SEED)
    trainer = cls(cfg)
    trainer.register_hooks(list(extra_hooks))
    trainer.resume_or_load(resume)
    trainer.train()
    return trainer


def losses(trainer):
    return trainer.storage.history("total_loss").values()


def same_weights(a, b):
    first, second = a.model.state_dict(), b.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def lines_of(folder):
    text = open(os.path.join(folder, "metrics.json")).read()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture(scope="module")
def stock(tmp_path_factory, datasets_dir):
    """20 steps of Detectron2's own DefaultTrainer."""
    folder = tmp_path_factory.mktemp("stock")
    os.environ["DETECTRON2_DATASETS"] = str(datasets_dir)
    cfg = config(folder, steps=20)
    from d2amp_ext.data.register import register_datasets

    register_datasets(cfg)
    return run(Stock, cfg)


def test_off_is_detectron2s_own_trainer_bit_for_bit(stock, tmp_path):
    ours = run(Ours, config(tmp_path, steps=20))
    assert type(ours._trainer) is SimpleTrainer and ours.last_step is None
    assert losses(ours) == losses(stock) and len(losses(ours)) == 20
    assert same_weights(ours, stock)


def test_fp32_with_amp_gives_the_same_bits(stock, tmp_path):
    ours = run(Ours, config(tmp_path, *ON, "fp32", "MONITOR.PERIOD", "20", steps=20))
    assert type(ours._trainer) is AMPTrainer
    assert losses(ours) == losses(stock) and same_weights(ours, stock)
    assert ours.last_step.iteration == 19


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_learns_and_writes_valid_json(tmp_path, stock, precision):
    ours = run(Ours, config(tmp_path, *ON, precision, steps=4))
    first = dict((i, value) for value, i in losses(ours))
    reference = dict((i, value) for value, i in losses(stock))
    assert first[0] == pytest.approx(reference[0], rel=0.05)
    assert any("total_loss" in line for line in lines_of(tmp_path))
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]["_trainer"]["grad_scaler"]


def test_settings_without_effect_are_named_in_one_warning(tmp_path, caplog):
    Ours(config(tmp_path, "SOLVER.AMP.PRECISION", "bf16", "SOLVER.AMP.NONFINITE", "raise"))
    found = [r.getMessage() for r in caplog.records if "have no effect" in r.getMessage()]
    assert len(found) == 1 and "SOLVER.AMP.PRECISION" in found[0] and "SOLVER.AMP.NONFINITE" in found[0]


class StopAt(HookBase):
    def __init__(self, step):
        self.step = step

    def after_step(self):
        if self.trainer.iter + 1 == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "opts",
    [
        [],
        [*ON, "fp32"],
        [*ON, "bf16", "SOLVER.ACCUMULATE_STEPS", "2"],
        [*ON, "fp16", "SOLVER.OPTIMIZER", "ADAMW", "SOLVER.BASE_LR", "1e-3"],
    ],
)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, opts):
    """With evaluations, which draw random numbers, and checkpoints in the same iterations."""
    opts = [*opts, "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"]
    whole = run(PrecisionTrainer, config(tmp_path / "a", *opts, steps=8))
    with pytest.raises(KeyboardInterrupt):
        run(PrecisionTrainer, config(tmp_path / "b", *opts, steps=8), extra_hooks=[StopAt(5)])
    resumed = run(PrecisionTrainer, config(tmp_path / "b", *opts, steps=8), resume=True)
    assert resumed.start_iter == 3
    assert dict((i, v) for v, i in losses(resumed)) == {i: v for v, i in losses(whole) if i >= 3}
    assert same_weights(whole, resumed)
    final = [torch.load(tmp_path / name / "model_final.pth", weights_only=True)["trainer"] for name in "ab"]
    assert_equal_states(*final)


def assert_equal_states(a, b, path="trainer"):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal_states(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for number, pair in enumerate(zip(a, b)):
            assert_equal_states(*pair, f"{path}[{number}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b or (a != a and b != b), path


def test_a_run_killed_between_checkpoint_and_evaluation_evaluates_first(tmp_path):
    class DiesInEvaluation(PrecisionTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            raise KeyboardInterrupt

    opts = [*ON, "fp32", "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"]
    whole = run(PrecisionTrainer, config(tmp_path / "a", *opts))
    with pytest.raises(KeyboardInterrupt):
        run(DiesInEvaluation, config(tmp_path / "b", *opts))
    resumed = run(PrecisionTrainer, config(tmp_path / "b", *opts), resume=True)
    assert same_weights(whole, resumed)


def test_resuming_without_changing_what_stock_draws(stock, tmp_path):
    """The first 20 losses are stock's even though positions and random states are recorded on the way."""
    ours = run(Ours, config(tmp_path, *ON, "fp32", "SOLVER.CHECKPOINT_PERIOD", "4", steps=20))
    assert losses(ours) == losses(stock)


def test_checkpoints_go_from_stock_to_ours_and_back(stock, tmp_path):
    folder = stock.cfg.OUTPUT_DIR
    cfg = config(tmp_path, *ON, "fp16", steps=22)
    ours = Ours(cfg)
    ours.checkpointer.load(os.path.join(folder, "model_final.pth"))
    assert ours.iter == 19 and same_weights(ours, stock)
    ours.start_iter = 20
    ours.train()
    back = Stock(stock.cfg)
    DetectionCheckpointer(back.model, trainer=weakref.proxy(back)).load(str(tmp_path / "model_final.pth"))
    assert back.iter == 21 and same_weights(back, ours)


def test_a_checkpoint_without_inner_state_starts_the_optimizer_afresh(tmp_path, caplog):
    ours = Ours(config(tmp_path, *ON, "fp32"))
    state = ours.state_dict()
    del state["_trainer"]
    ours.load_state_dict(state)
    assert "no optimizer state" in caplog.text


class BackwardHook(HookBase):
    def __init__(self):
        self.calls = 0

    def after_backward(self):
        self.calls += 1


def test_after_backward_reaches_hooks_of_the_outer_trainer(tmp_path):
    hook = BackwardHook()
    run(Ours, config(tmp_path, *ON, "fp32", steps=3), extra_hooks=[hook])
    assert hook.calls == 3


class Spoil(HookBase):
    """Makes the gradients of some iterations infinite."""

    def __init__(self, *iterations):
        self.iterations, self.rates, self.skipped = iterations, [], []

    def after_backward(self):
        if self.trainer.iter in self.iterations:
            next(p for p in self.trainer.model.parameters() if p.grad is not None).grad.fill_(math.inf)

    def after_step(self):
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])
        self.skipped.append(self.trainer.last_step.skipped)


@pytest.mark.parametrize("hold", ["True", "False"])
def test_the_learning_rate_on_skips_and_no_warning_of_torch(tmp_path, hold, recwarn):
    spoil = Spoil(0, 1)
    opts = [*ON, "bf16", "SOLVER.AMP.HOLD_LR_ON_SKIP", hold, "SOLVER.WARMUP_ITERS", "10", "SOLVER.WARMUP_METHOD", "linear"]
    run(Ours, config(tmp_path, *opts, steps=5), extra_hooks=[spoil])
    assert spoil.skipped == [True, True, False, False, False]
    held = spoil.rates[0] == spoil.rates[1] < spoil.rates[2] if hold == "True" else spoil.rates[0] < spoil.rates[1]
    assert held
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]
    assert "total_loss" in lines_of(tmp_path)[-1]


def test_giving_up_ends_the_run_and_keeps_what_was_written(tmp_path):
    with pytest.raises(FloatingPointError, match="MAX_CONSECUTIVE_SKIPS = 2"):
        run(Ours, config(tmp_path, *ON, "bf16", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2"), extra_hooks=[Spoil(*range(9))])


# Other people's trainers


class Theirs(DefaultTrainer):
    """Overrides what research repositories override."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.Adam(model.parameters(), lr=1e-4)

    @classmethod
    def build_train_loader(cls, cfg):
        cls.seen_enabled = cfg.SOLVER.AMP.ENABLED
        return build_detection_train_loader(cfg)

    def run_step(self):
        self.my_steps = getattr(self, "my_steps", 0) + 1
        super().run_step()

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {"mine": {"AP": 1.0}}


class Mixed(PrecisionTrainerMixin, Theirs):
    pass


def test_the_mixin_keeps_the_parts_of_the_class_it_is_mixed_into(tmp_path):
    trainer = run(Mixed, config(tmp_path, *ON, "fp32", "SOLVER.OPTIMIZER", "ADAMW", steps=2))
    assert type(trainer.optimizer) is torch.optim.Adam and trainer.my_steps == 2
    assert type(trainer._trainer) is AMPTrainer and Mixed.seen_enabled is True
    assert trainer.storage.latest()["mine/AP"][0] == 1.0


def test_a_constructor_that_goes_its_own_way(tmp_path):
    class Own(PrecisionTrainerMixin, DefaultTrainer):
        def __init__(self, cfg):
            super(DefaultTrainer, self).__init__()
            model = self.build_model(cfg)
            optimizer = self.build_optimizer(cfg, model)
            self._trainer = StockAMPTrainer(
                model, self.build_train_loader(cfg), optimizer, grad_scaler=torch.amp.GradScaler("cpu")
            )
            self.scheduler = self.build_lr_scheduler(cfg, optimizer)
            self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
            self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
            self.register_hooks([hooks.IterationTimer(), hooks.LRScheduler()])

    trainer = run(Own, config(tmp_path, *ON, "bf16", steps=2))
    assert type(trainer._trainer) is AMPTrainer and trainer.last_step.iteration == 1


def test_a_trainer_made_on_purpose_is_left_alone(tmp_path, caplog):
    class Special(SimpleTrainer):
        pass

    class Own(PrecisionTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            inner = self._trainer
            self._trainer = Special(inner.model, inner.data_loader, inner.optimizer)

    with caplog.at_level(logging.WARNING):
        assert type(Own(config(tmp_path, *ON, "fp32"))._trainer) is Special
    assert "Special" in caplog.text


def test_the_registry_names_the_inner_trainer(tmp_path):
    @TRAINER_REGISTRY.register()
    class Noted(AMPTrainer):
        pass

    try:
        assert type(Ours(config(tmp_path, *ON, "fp32", "SOLVER.AMP.TRAINER", "Noted"))._trainer) is Noted
        with pytest.raises(UserError, match="SOLVER.AMP.TRAINER = 'Notd'.*AMPTrainer"):
            Ours(config(tmp_path, *ON, "fp32", "SOLVER.AMP.TRAINER", "Notd"))._trainer
    finally:
        TRAINER_REGISTRY._obj_map.pop("Noted")


def test_precise_bn_runs_in_the_precision_of_training(tmp_path):
    cfg = config(tmp_path, *ON, "bf16", "TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.NUM_ITER", "1", steps=1)
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"
    seen = set()

    class Watch(Ours):
        @classmethod
        def build_model(cls, cfg):
            model = super().build_model(cfg)
            model.backbone.register_forward_hook(lambda m, i, out: seen.add(next(iter(out.values())).dtype))
            return model

    run(Watch, cfg)
    assert seen == {torch.bfloat16}  # a forward of PreciseBN in fp32 would have added torch.float32


def test_metrics_are_flushed_before_any_writer_writes(tmp_path):
    class Often(Ours):
        def build_hooks(self):
            return [hook if not isinstance(hook, hooks.PeriodicWriter) else hooks.PeriodicWriter(hook._writers, period=3)
                    for hook in super().build_hooks()]  # fmt: skip

    run(Often, config(tmp_path, *ON, "fp32", "MONITOR.PERIOD", "20", steps=6))
    assert [line["iteration"] for line in lines_of(tmp_path) if "total_loss" in line] == [2, 5]


def test_numpy_is_seeded_like_stock(tmp_path):
    seed_all_rng(3)
    Ours(config(tmp_path, *ON, "fp32"))
    first = np.random.rand()
    seed_all_rng(3)
    Stock(config(tmp_path))
    assert np.random.rand() == first
