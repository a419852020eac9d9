"""PolicyPrecision with a LightningModule of one's own: the policy alone, without Detectron2's models or configs."""

import logging
import math

import lightning
import pytest
import torch
from conftest import TinyModel, tiny_data
from lightning.pytorch.plugins.precision import MixedPrecision

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions, UserError
from d2amp_ext.lightning import PolicyPrecision
from detectron2.utils.events import EventStorage

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
         "accelerator": "cpu", "max_epochs": 1}  # fmt: skip


class Own(lightning.LightningModule):
    """A user's module: one loss, SGD with momentum."""

    def __init__(self, lr=0.05, raise_at=(), seen=None):
        super().__init__()
        self.model = TinyModel()
        self.lr = lr
        self.raise_at = raise_at
        self.records = []
        self.dtypes = set()

    def training_step(self, batch, batch_idx):
        if batch_idx in self.raise_at:
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        self.dtypes.add(self.model.first(batch[0]["x"]).dtype)
        return sum(self.model(batch).values())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        record = getattr(self.trainer.precision_plugin, "last_step", None)
        if record is not None and (not self.records or record is not self.records[-1]):
            self.records.append(record)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Loader(list):
    """Batches of samples, as a loader that Lightning leaves as it is."""


def fit(policy, data, module=None, evaluation=None, **options):
    module = module or Own()
    plugin = PolicyPrecision(policy, evaluation)
    trainer = lightning.Trainer(plugins=[plugin], **{**QUIET, **options})
    trainer.fit(module, Loader(data))
    return module, plugin, trainer


def reference(policy, data, window=1):
    """The same training by our own trainer."""
    model = TinyModel()
    trainer = AMPTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), policy=policy,
                         accumulate_steps=window)  # fmt: skip
    records = []
    with EventStorage(0) as trainer.storage:
        for trainer.iter in range(len(data) // window):
            trainer.run_step()
            records.append(trainer.last_step)
    return model, records, trainer


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_same_bits_as_our_trainer(precision, window):
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=2.0**18, min_scale=2.0))
    data = tiny_data(40, spoil=[5, 6])
    model, records, trainer = reference(policy, data, window)
    module, plugin, _ = fit(policy, data, accumulate_grad_batches=window)
    assert [(r.iteration, r.skipped, r.cause, r.skips, r.skips_in_row) for r in module.records] == [
        (r.iteration, r.skipped, r.cause, r.skips, r.skips_in_row) for r in records
    ]
    assert sum(r.skipped for r in records) >= 1
    assert [r.scale.item() for r in module.records] == [r.scale.item() for r in records]
    norms = [[r.grad_norm.item() for r in rows if not r.skipped] for rows in (module.records, records)]
    assert norms[0] == norms[1] and len(norms[0]) > 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, module.model.state_dict()[name]), name
    assert plugin.state_dict()["grad_scaler"] == trainer.state_dict()["grad_scaler"]


@pytest.mark.parametrize(
    "precision, name, dtype",
    [("fp32", "32-true", torch.float32), ("bf16", "bf16-mixed", torch.bfloat16), ("fp16", "16-mixed", torch.float16)],
)
def test_fp16_on_a_cpu_stays_fp16_and_the_trainer_shows_lightnings_name(precision, name, dtype, caplog):
    """Lightning itself trains in bf16 when it is asked for 16-mixed on a CPU."""
    with caplog.at_level(logging.INFO, logger="d2amp_ext"):
        module, plugin, trainer = fit(PrecisionPolicy(precision), tiny_data(2))
    assert trainer.precision == name and module.dtypes == {dtype}
    assert plugin.policy.device == "cpu" and f"Precision of training: {precision} on cpu" in caplog.text


def test_auto_is_resolved_for_the_device_of_the_trainer():
    _, plugin, _ = fit(PrecisionPolicy("auto"), tiny_data(1))
    assert plugin.policy == PrecisionPolicy("auto").resolve("cpu")


def test_the_losses_of_the_record():
    module, _, _ = fit(PrecisionPolicy("fp32"), tiny_data(1))
    expected = sum(TinyModel()(tiny_data(1)[0]).values())
    assert module.records[0].losses.keys() == {"total_loss"}
    assert torch.equal(module.records[0].losses["total_loss"], expected.detach())


def test_a_forward_that_raises_is_a_skip():
    module, _, trainer = fit(PrecisionPolicy("fp32"), tiny_data(5), Own(raise_at=(1, 2)))
    assert [r.cause for r in module.records] == [None, "forward", "forward", None, None]
    assert trainer.global_step == 5


def test_a_loss_on_which_nothing_depends_is_a_skip():
    class Detached(Own):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss.detach() if batch_idx == 1 else loss

    module, _, _ = fit(PrecisionPolicy("bf16"), tiny_data(3), Detached())
    assert [r.cause for r in module.records] == [None, "no_gradient", None]


def test_it_gives_up_as_the_policy_says():
    policy = PrecisionPolicy("bf16", max_consecutive_skips=2)
    module = Own()
    with pytest.raises(FloatingPointError, match="MAX_CONSECUTIVE_SKIPS = 2.*Learning rate 0.05") as caught:
        fit(policy, tiny_data(9, spoil=range(3, 9)), module)
    assert caught.value.record.iteration == 5 and all(torch.isfinite(p).all() for p in module.parameters())
    with pytest.raises(FloatingPointError, match="NONFINITE is 'raise'"):
        fit(PrecisionPolicy("fp32", nonfinite="raise"), tiny_data(3, spoil=[1]))


def test_min_scale_holds():
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=16.0, min_scale=4.0), max_consecutive_skips=9)
    module, plugin, _ = fit(policy, tiny_data(6, spoil=range(6)))
    assert [r.scale.item() for r in module.records] == [16, 8, 4, 4, 4, 4] and plugin.scaler.get_scale() == 4


def test_clipping_acts_on_true_gradients_and_the_record_has_the_norm_before_it():
    class Clipped(Own):
        def on_before_zero_grad(self, optimizer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            if gradients:
                self.norms = [*getattr(self, "norms", []), math.hypot(*(g.norm().item() for g in gradients))]

    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=1024.0))
    module, _, _ = fit(policy, tiny_data(4), Clipped(), gradient_clip_val=0.01)
    assert all(norm == pytest.approx(0.01, rel=1e-3) for norm in module.norms) and len(module.norms) == 3
    assert all(r.grad_norm.item() > 0.02 for r in module.records)


def test_hooks_before_the_step_see_true_gradients_and_can_make_a_skip():
    class Spoiling(Own):
        def on_before_optimizer_step(self, optimizer):
            gradient = self.model.first.weight.grad
            self.largest = max(getattr(self, "largest", 0), gradient.abs().max().item())
            if self.trainer.global_step == 1:
                gradient.fill_(math.nan)

    module, _, _ = fit(PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=1024.0)), tiny_data(3), Spoiling())
    assert [r.cause for r in module.records] == [None, "gradient", None]
    assert module.largest < 100  # 1024 times as much while they are scaled


def test_tf32_switches_hold_while_it_trains_only():
    class Watching(Own):
        def on_after_backward(self):
            self.seen = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for precision in ("fp32", "bf16"):
        module, _, _ = fit(PrecisionPolicy(precision), tiny_data(1), Watching())
        assert module.seen == (("highest", False) if precision == "fp32" else before)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_they_are_put_back_after_an_error():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with pytest.raises(FloatingPointError):
        fit(PrecisionPolicy("fp32", nonfinite="raise"), tiny_data(3, spoil=[1]))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


class Manual(Own):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(sum(self.model(batch).values()))
            optimizer.step()
            self.records.append(self.trainer.precision_plugin.last_step)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.model.first, self.model.second)]


def test_manual_optimization():
    module = Manual()
    fit(PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=2.0)), tiny_data(3, spoil=[1]), module)
    # A batch makes two updates, one for each optimizer.
    assert [r.skipped for r in module.records] == [False, False, True, True, False, False]
    assert [r.iteration for r in module.records] == [0, 1, 2, 3, 4, 5]


def test_validation_runs_in_its_own_precision():
    class Validated(Own):
        def validation_step(self, batch, batch_idx):
            self.validated = self.model.first(batch[0]["x"]).dtype

    for evaluation, dtype in [(None, torch.bfloat16), (PrecisionPolicy("off"), torch.float32), (PrecisionPolicy("fp16"), torch.float16)]:
        module = Validated()
        plugin = PolicyPrecision(PrecisionPolicy("bf16"), evaluation)
        lightning.Trainer(plugins=[plugin], **QUIET).fit(module, Loader(tiny_data(1)), Loader(tiny_data(1)))
        assert module.validated is dtype


def checkpointed(tmp_path, policy, data, ckpt_path=None):
    module, plugin = Own(), PolicyPrecision(policy)
    trainer = lightning.Trainer(plugins=[plugin], **{**QUIET, "max_epochs": 2 if ckpt_path else 1})
    trainer.fit(module, Loader(data), ckpt_path=ckpt_path)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    return module, plugin


def test_counts_and_scale_go_on_after_a_resume(tmp_path):
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=64.0))
    checkpointed(tmp_path, policy, tiny_data(4, spoil=[1, 3]))
    state = torch.load(tmp_path / "own.ckpt", weights_only=True)["PolicyPrecision"]
    assert (state["iteration"], state["skips"], state["skips_in_row"], state["grad_scaler"]["scale"]) == (3, 2, 1, 16.0)
    module, plugin = checkpointed(tmp_path, policy, tiny_data(4), str(tmp_path / "own.ckpt"))
    assert [r.iteration for r in module.records] == [4, 5, 6, 7] and module.records[0].scale == 16
    assert (module.records[0].skips, module.records[0].skips_in_row) == (2, 0)


def test_a_precision_without_a_scaler_passes_its_state_on(tmp_path):
    scaled = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=64.0))
    checkpointed(tmp_path, scaled, tiny_data(2, spoil=[1]))
    checkpointed(tmp_path, PrecisionPolicy("bf16"), tiny_data(2), str(tmp_path / "own.ckpt"))
    state = torch.load(tmp_path / "own.ckpt", weights_only=True)["PolicyPrecision"]
    assert state["grad_scaler"]["scale"] == 32


def test_the_scale_of_lightnings_own_plugin_is_taken_over(tmp_path):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))
    trainer = lightning.Trainer(plugins=[plugin], **QUIET)
    trainer.fit(Own(), Loader(tiny_data(2)))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    module, _ = checkpointed(tmp_path, PrecisionPolicy("fp16"), tiny_data(2), str(tmp_path / "own.ckpt"))
    assert module.records[0].scale == 512 and module.records[0].iteration == 2


def test_lbfgs_and_a_policy_that_is_off_are_mistakes():
    class Searching(Own):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UserError, match="LBFGS"):
        fit(PrecisionPolicy("fp32"), tiny_data(1), Searching())
    with pytest.raises(UserError, match="off"):
        PolicyPrecision(PrecisionPolicy("off"))


def test_trying_again_in_fp32_needs_the_batches():
    with pytest.raises(UserError, match="'retry_fp32'.*Own must keep .*window"):
        fit(PrecisionPolicy("bf16", nonfinite="retry_fp32"), tiny_data(1))
