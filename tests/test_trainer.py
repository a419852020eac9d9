import json
import warnings

import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import JSONWriter

from d2amp_ext import TRAINER_REGISTRY, AMPTrainer, NonFiniteError, PrecisionPolicy, ScalerOptions


def train(cls, data=None, steps=20, hooks=(), **options):
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = cls(model, data or tiny_data(), optimizer, **options)
    trainer.register_hooks(list(hooks))
    trainer.train(0, steps)
    return trainer


def losses(trainer):
    return trainer.storage.history("total_loss").values()


def policy(precision, **options):
    return PrecisionPolicy(precision, **options)


def test_fp32_gives_the_bits_of_simple_trainer():
    stock = train(SimpleTrainer)
    for options in ({}, {"zero_grad_before_forward": True}, {"gather_metric_period": 7}, {"async_write_metrics": True}):
        ours = train(AMPTrainer, policy=policy("fp32"), **options)
        assert losses(ours) == losses(stock)
        for a, b in zip(ours.model.parameters(), stock.model.parameters()):
            assert torch.equal(a, b)


def test_it_is_a_stock_amp_trainer_and_takes_its_arguments_by_position():
    trainer = AMPTrainer(TinyModel(), [], torch.optim.SGD(TinyModel().parameters(), 0.1), 5, True, None, torch.bfloat16, True)
    assert isinstance(trainer, StockAMPTrainer)
    assert (trainer.gather_metric_period, trainer.zero_grad_before_forward, trainer.log_grad_scaler) == (5, True, True)
    assert trainer.policy.precision == "bf16" and trainer.precision is torch.bfloat16


def test_async_write_metrics_is_not_swallowed():
    trainer = AMPTrainer(TinyModel(), [], torch.optim.SGD(TinyModel().parameters(), 0.1), async_write_metrics=True)
    assert trainer.async_write_metrics is True


def test_no_torch_warning_in_construction_or_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(AMPTrainer, steps=2, policy=policy("fp16", scaler=ScalerOptions(init_scale=16.0)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": policy("bf16"), "precision": torch.float16}, "policy"),
        ({"policy": policy("fp16"), "grad_scaler": torch.amp.GradScaler("cpu")}, "policy"),
        ({"precision": torch.bfloat16, "grad_scaler": torch.amp.GradScaler("cpu")}, "Only fp16"),
        ({"policy": policy("off")}, "SimpleTrainer"),
        ({"accumulate_steps": 0}, "accumulate_steps = 0"),
        ({"precision": torch.int8}, "no precision"),
    ],
)
def test_combinations_that_make_no_sense(options, message):
    model = TinyModel()
    with pytest.raises(ValueError, match=message):
        AMPTrainer(model, [], torch.optim.SGD(model.parameters(), 0.1), **options)


def test_data_parallel_is_refused():
    model = torch.nn.DataParallel(TinyModel())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        AMPTrainer(model, [], torch.optim.SGD(model.parameters(), 0.1))


def test_a_scaler_of_the_user_means_fp16_and_is_used():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer = train(AMPTrainer, steps=3, grad_scaler=scaler)
    assert trainer.policy.precision == "fp16" and trainer.grad_scaler is scaler
    assert scaler.state_dict()["_growth_tracker"] == 3


def test_without_a_policy_it_is_auto():
    assert train(AMPTrainer, steps=1).policy.reason.startswith("auto: ")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_every_precision_learns_and_stays_near_fp32(precision):
    ours = train(AMPTrainer, policy=policy(precision, scaler=ScalerOptions(init_scale=16.0)))
    reference = [value for value, _ in losses(train(SimpleTrainer))]
    values = [value for value, _ in losses(ours)]
    assert len(values) == 20 and ours.last_step.skips == 0
    assert max(abs(a - b) for a, b in zip(values, reference)) < (1e-6 if precision == "tf32" else 0.05)


def test_accumulation_gives_the_updates_of_the_larger_batch():
    whole = tiny_data(10, size=4)
    halves = [[{"x": part}] for batch in whole for part in batch[0]["x"].split(2)]
    one = train(AMPTrainer, whole, 10, policy=policy("fp32"))
    two = train(AMPTrainer, halves, 10, policy=policy("fp32"), accumulate_steps=2)
    for a, b in zip(one.model.parameters(), two.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for (a, i), (b, j) in zip(losses(one), losses(two)):
        assert i == j and a == pytest.approx(b, rel=1e-5)


class Recorder(HookBase):
    def __init__(self):
        self.steps, self.norms = [], []

    def after_backward(self):
        self.norms.append(torch.stack([p.grad.norm() for p in self.trainer.model.parameters()]).norm().item())

    def after_step(self):
        self.steps.append(self.trainer.last_step)


def test_hooks_see_the_record_of_their_own_step_and_true_gradients():
    recorder = Recorder()
    train(AMPTrainer, steps=4, hooks=[recorder], policy=policy("fp16", scaler=ScalerOptions(init_scale=32.0)))
    assert [step.iteration for step in recorder.steps] == [0, 1, 2, 3]
    for norm, step in zip(recorder.norms, recorder.steps):
        assert norm == pytest.approx(step.grad_norm.item(), rel=1e-5) and norm < 50


def test_skipped_steps_leave_valid_json_and_no_infinity(tmp_path):
    path = tmp_path / "metrics.json"
    data = tiny_data(20, spoil={0, 1, 5})
    writer = PeriodicWriter([JSONWriter(str(path), window_size=1)], period=1)
    trainer = train(AMPTrainer, data, 12, hooks=[writer], policy=policy("bf16"))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    with_loss = {line["iteration"] for line in lines if "total_loss" in line}
    assert with_loss == set(range(12)) - {0, 1, 5}
    assert trainer.last_step.skips == 3


def test_losses_wait_for_the_period_and_none_is_dropped():
    class Watch(HookBase):
        seen = []

        def after_step(self):
            history = self.trainer.storage.histories().get("total_loss")
            self.seen.append(len(history.values()) if history else 0)

    trainer = train(AMPTrainer, steps=10, hooks=[Watch()], policy=policy("fp32"), gather_metric_period=4)
    assert Watch.seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 10]
    assert [iteration for _, iteration in losses(trainer)] == list(range(10))


def test_losses_of_a_run_that_dies_are_written():
    class Die(HookBase):
        def after_step(self):
            if self.trainer.iter == 5:
                raise RuntimeError("died")

    model = TinyModel()
    trainer = AMPTrainer(model, tiny_data(), torch.optim.SGD(model.parameters(), 0.1), 20, policy=policy("fp32"))
    trainer.register_hooks([Die()])
    with pytest.raises(RuntimeError, match="died"):
        trainer.train(0, 20)
    assert [iteration for _, iteration in losses(trainer)] == list(range(6))


def test_giving_up_names_learning_rate_and_images():
    with pytest.raises(NonFiniteError) as error:
        train(AMPTrainer, tiny_data(20, spoil={2}), policy=policy("bf16", nonfinite="raise"))
    assert "image_2.png" in str(error.value) and "0.05" in str(error.value) and "iteration 2" in str(error.value)


def test_a_forward_that_raises_floating_point_error_is_a_skip():
    class Diverging(TinyModel):
        def forward(self, batch):
            if "spoil" in batch[0]:
                raise FloatingPointError("Predicted boxes or scores contain Inf/NaN. Training has diverged.")
            return super().forward(batch)

    model = Diverging()
    trainer = AMPTrainer(
        model, tiny_data(10, spoil={4}), torch.optim.SGD(model.parameters(), 0.1), policy=policy("fp16")
    )
    recorder = Recorder()
    trainer.register_hooks([recorder])
    trainer.train(0, 8)
    assert recorder.steps[4].cause == "forward" and not recorder.steps[5].skipped


def test_the_grad_scaler_can_be_logged_under_detectron2s_name():
    trainer = train(AMPTrainer, steps=3, policy=policy("fp16", scaler=ScalerOptions(init_scale=8.0)), log_grad_scaler=True)
    assert [value for value, _ in trainer.storage.history("[metric]grad_scaler").values()] == [8.0, 8.0, 8.0]


PRECISIONS = ["fp32", "tf32", "fp16", "bf16"]
OPTIONS = ScalerOptions(init_scale=64.0, growth_interval=4)


def stock_state(kind):
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "stock fp32":
        trainer = SimpleTrainer(model, tiny_data(), optimizer)
        trainer.train(0, 6)
        return trainer.state_dict()
    # Stock AMPTrainer trains on CUDA only: its state is made of a trained optimizer and a scaler that has moved.
    trainer = StockAMPTrainer(model, tiny_data(), optimizer, grad_scaler=torch.amp.GradScaler("cpu"))
    trainer.iter = 5
    state = trainer.state_dict()
    state["optimizer"] = stock_state("stock fp32")["optimizer"]
    state["grad_scaler"].update(scale=1024.0, _growth_tracker=3)
    return state


def state_of(kind):
    if kind.startswith("stock"):
        return stock_state(kind)
    return train(AMPTrainer, steps=6, policy=policy(kind, scaler=OPTIONS)).state_dict()


@pytest.mark.parametrize("target", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("source", ["stock fp32", "stock AMP", *PRECISIONS])
def test_every_checkpoint_resumes_into_every_precision(source, target, caplog):
    state = state_of(source)
    model = TinyModel()
    trainer = AMPTrainer(
        model, tiny_data(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), policy=policy(target, scaler=OPTIONS)
    )
    with caplog.at_level("INFO"):
        trainer.load_state_dict(state)
    assert trainer.iter == state["iteration"]
    if target == "fp16":
        scale = trainer.grad_scaler.get_scale()
        expected = {"stock AMP": 1024.0, "fp16": state.get("grad_scaler", {}).get("scale"), "stock fp32": 64.0}
        assert scale == expected.get(source, 64.0)
        assert trainer.grad_scaler.state_dict()["growth_interval"] == 4  # settings are the config's
        assert ("no gradient scaler state" in caplog.text) == (source == "stock fp32")
    trainer.train(trainer.iter + 1, trainer.iter + 3)
    assert not trainer.last_step.skipped


@pytest.mark.parametrize("source", PRECISIONS)
@pytest.mark.parametrize("options", [OPTIONS, ScalerOptions(static=32.0)])
def test_stock_trainers_load_our_state_and_go_on(source, options):
    state = train(AMPTrainer, steps=6, policy=policy(source, scaler=options)).state_dict()
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    StockAMPTrainer(model, tiny_data(), optimizer, grad_scaler=scaler).load_state_dict(state)
    loaded = scaler.state_dict()
    assert loaded["growth_factor"] > 1 and loaded["backoff_factor"] < 1 and loaded["scale"] > 0
    simple = SimpleTrainer(model, tiny_data(), optimizer)
    simple.load_state_dict(state)
    simple.train(simple.iter + 1, 9)


def test_scaler_state_survives_a_stretch_in_another_precision():
    fp16 = train(AMPTrainer, steps=6, policy=policy("fp16", scaler=OPTIONS)).state_dict()
    model = TinyModel()
    bf16 = AMPTrainer(model, tiny_data(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), policy=policy("bf16"))
    bf16.load_state_dict(fp16)
    assert bf16.state_dict()["grad_scaler"] == fp16["grad_scaler"]


def test_an_empty_scaler_state_is_a_missing_one(caplog):
    state = {**state_of("fp32"), "grad_scaler": {}}
    model = TinyModel()
    trainer = AMPTrainer(model, [], torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), policy=policy("fp16"))
    with caplog.at_level("INFO"):
        trainer.load_state_dict(state)
    assert trainer.grad_scaler.get_scale() == 65536.0 and "no gradient scaler state" in caplog.text


def test_counts_of_skips_go_on_after_a_resume():
    first = train(AMPTrainer, tiny_data(20, spoil={3, 5}), 6, policy=policy("bf16"))
    model = TinyModel()
    second = AMPTrainer(
        model, tiny_data(20, spoil={0}), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), policy=policy("bf16")
    )
    second.load_state_dict(first.state_dict())
    second.train(6, 7)
    assert (second.last_step.skips, second.last_step.skips_in_row) == (3, 2)


def test_the_registry_knows_our_trainer():
    assert TRAINER_REGISTRY.get("AMPTrainer") is AMPTrainer


def test_it_describes_its_precision_and_what_stays_in_fp32():
    def trainer(precision, **options):
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return AMPTrainer(model, tiny_data(1), optimizer, policy=policy(precision, **options))

    made = trainer("bf16", fp32_modules=("second",))
    assert made.describe() == f"{made.policy.describe()}; {made.protection.describe()}"
    for part in ("bf16 on cpu (as configured)", "shielded in fp32: nothing", "FP32_MODULES 'second': second"):
        assert part in made.describe()
    assert trainer("fp32").describe() == trainer("fp32").policy.describe()  # all of it is in fp32
