"""What only a CUDA device can show. Everything else about the trainer is in test_trainer.py."""

import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import SimpleTrainer

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions
from d2amp_ext._compat import native_precisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]


def on_gpu(batches):
    return [[{**sample, "x": sample["x"].cuda()} for sample in batch] for batch in batches]


def train(cls, data=None, steps=20, **options):
    model = TinyModel().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = cls(model, data or on_gpu(tiny_data()), optimizer, **options)
    trainer.train(0, steps)
    return trainer


def losses(trainer):
    return [value for value, _ in trainer.storage.history("total_loss").values()]


def test_fp16_follows_stock_amp_trainer():
    stock = train(StockAMPTrainer, grad_scaler=torch.amp.GradScaler("cuda", init_scale=64.0))
    ours = train(AMPTrainer, policy=PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=64.0)))
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-3)
    assert ours.grad_scaler.get_scale() == stock.grad_scaler.get_scale()


def test_fp32_gives_the_losses_of_simple_trainer():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        stock = train(SimpleTrainer)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert losses(train(AMPTrainer, policy=PrecisionPolicy("fp32"))) == losses(stock)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_a_skip_leaves_the_parameters(precision):
    if precision not in native_precisions("cuda")[0]:
        pytest.skip(f"this device has no {precision}")
    trainer = train(AMPTrainer, on_gpu(tiny_data(6, spoil={2})), 6, policy=PrecisionPolicy(precision))
    assert trainer.last_step.skips >= 1
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_synchronisation_a_step_between_two_periods(precision):
    options = ScalerOptions(init_scale=4.0)
    trainer = train(AMPTrainer, steps=2, gather_metric_period=1000, policy=PrecisionPolicy(precision, scaler=options))
    trainer._data_loader_iter_obj = iter(on_gpu(tiny_data()))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as warned, trainer.storage:
            trainer.iter = 2
            trainer.run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in warned) == 1


def test_auto_is_native():
    trainer = train(AMPTrainer, steps=1)
    assert trainer.policy.precision in native_precisions("cuda")[0]
    assert trainer.policy.device.startswith("cuda")
