"""Running statistics of normalization layers after steps that were dropped or made again."""

import pytest
import torch
from conftest import TinyModel, tiny_data
from torch import nn

from d2amp_ext import AMPTrainer, NonFiniteError, PrecisionPolicy, ScalerOptions
from d2amp_ext.numerics.statistics import RunningStatistics


class Normed(TinyModel):
    """With batch norm; the entry "huge" of a sample makes an activation that overflows fp16 and nothing else."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.dtypes = []

    def forward(self, batch):
        x = torch.cat([sample["x"] for sample in batch])
        hidden = self.first(x)
        self.dtypes.append(hidden.dtype)
        factor = batch[0].get("huge", 1.0)
        hidden = (hidden * factor).float() / factor
        y = self.second(self.dropout(torch.relu(self.norm(hidden)))).float()
        return {"loss_a": (y - 1).pow(2).mean() * batch[0].get("spoil", 1.0)}


def data(count=12, huge=(), spoil=()):
    batches = tiny_data(count, spoil, size=8)
    for number in huge:
        batches[number][0]["huge"] = 1e6
    return batches


def run(policy, steps=6, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    window = options.pop("accumulate_steps", 1)
    model = Normed()
    trainer = AMPTrainer(model, data(steps * window, **options), optimizer(model.parameters(), lr=0.05), policy=policy,
                         accumulate_steps=window)  # fmt: skip
    seen = []
    trainer.after_step = lambda: seen.append(trainer.last_step)
    trainer.train(0, steps)
    return trainer, seen


def state(trainer):
    return [tensor.clone() for tensor in trainer.model.state_dict().values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def test_saving_and_restoring():
    model = Normed()
    statistics = RunningStatistics(model)
    for _ in range(2):
        statistics.save()
        before = [tensor.clone() for tensor in model.norm.state_dict().values()]
        model(data(1)[0])
        assert not same(before, model.norm.state_dict().values())
        statistics.restore()
        assert same(before, model.norm.state_dict().values()) and model.norm.num_batches_tracked == 0
    RunningStatistics(TinyModel()).save()
    RunningStatistics(nn.BatchNorm1d(2, track_running_stats=False)).restore()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_skipped_step_leaves_no_trace_in_them(precision, window):
    """As if the batch had never been seen."""
    policy = PrecisionPolicy(precision)
    spoilt = [2 * window]
    trainer, seen = run(policy, spoil=spoilt, accumulate_steps=window)
    assert [record.skipped for record in seen] == [False, False, True, False, False, False]
    torch.manual_seed(0)
    model = Normed()
    batches = data(6 * window, spoil=spoilt)
    kept = batches[: 2 * window] + batches[3 * window :]
    states = []
    other = AMPTrainer(model, kept, torch.optim.SGD(model.parameters(), lr=0.05), policy=policy, accumulate_steps=window)

    def draw_what_the_skipped_step_drew():  # dropout
        if other.iter == 1:
            states.extend(state(other))
            nn.Dropout(0.5)(torch.ones(8, 16))
            if window == 2:
                nn.Dropout(0.5)(torch.ones(8, 16))

    other.after_step = draw_what_the_skipped_step_drew
    other.train(0, 5)
    assert same(state(trainer), state(other)) and int(trainer.model.norm.num_batches_tracked) == 5 * window


def test_giving_up_restores_them_too():
    torch.manual_seed(0)
    model = Normed()
    trainer = AMPTrainer(model, data(3, spoil={1}), torch.optim.SGD(model.parameters(), lr=0.1),
                         policy=PrecisionPolicy("fp32", nonfinite="raise"))  # fmt: skip
    with pytest.raises(NonFiniteError):
        trainer.train(0, 3)
    assert int(model.norm.num_batches_tracked) == 1


# retry_fp32

FP16 = {"scaler": ScalerOptions(init_scale=64.0, growth_interval=1000), "nonfinite": "retry_fp32"}


@pytest.mark.parametrize("window", [1, 2])
def test_an_overflow_of_fp16_is_made_good_in_fp32(caplog, window):
    trainer, seen = run(PrecisionPolicy("fp16", **FP16), huge=[2 * window + window - 1], accumulate_steps=window)
    assert [record.retried for record in seen] == [False, False, True, False, False, False]
    assert (trainer.last_step.skips, trainer.last_step.retries, trainer.last_step.skips_in_row) == (0, 1, 0)
    assert not any(record.skipped for record in seen) and seen[2].cause is None
    assert trainer.grad_scaler.get_scale() == 32.0  # the overflow still lowers the scale
    expected = [torch.float16] * (2 * window) + [torch.float16] * window + [torch.float32] * window + [torch.float16] * (3 * window)
    assert trainer.model.dtypes == expected
    assert int(trainer.model.norm.num_batches_tracked) == 6 * window
    assert "Made the update of iteration 2 in fp32, for in fp16 a loss is not finite" in caplog.text
    assert [v for v, i in trainer.storage.history("total_loss").values() if i == 2 and v < 100]


def test_the_update_is_the_one_of_fp32():
    """The same batch from the same random state: exactly what a run in fp32 would have made of it."""
    trainer, _ = run(PrecisionPolicy("fp16", **FP16), steps=1, huge=[0])
    other, _ = run(PrecisionPolicy("fp32"), steps=1, huge=[0])
    assert same(state(trainer), state(other))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_bad_data_is_a_skip_and_counted_apart(precision):
    options = FP16 if precision == "fp16" else {"nonfinite": "retry_fp32"}
    trainer, seen = run(PrecisionPolicy(precision, **options), huge=[1], spoil=[3])
    assert [record.skipped for record in seen] == [False, False, False, True, False, False]
    assert seen[3].cause == "loss" and trainer.last_step.skips == 1
    assert trainer.last_step.retries == (1 if precision == "fp16" else 0)  # bf16 has fp32's range


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_fp32_has_nothing_to_retry(precision):
    trainer, seen = run(PrecisionPolicy(precision, nonfinite="retry_fp32"), spoil=[1])
    assert not any(record.retried for record in seen) and seen[1].skipped and trainer.last_step.retries == 0


def test_without_faults_nothing_differs():
    plain, _ = run(PrecisionPolicy("bf16"))
    retrying, _ = run(PrecisionPolicy("bf16", nonfinite="retry_fp32"))
    assert same(state(plain), state(retrying))


def test_counts_survive_a_resume():
    trainer, _ = run(PrecisionPolicy("fp16", **FP16), huge=[1], spoil=[3])
    saved = trainer.state_dict()
    assert saved["skips"] == {"skips": 1, "skips_in_row": 0, "retries": 1}
    other, _ = run(PrecisionPolicy("fp16", **FP16), steps=1)
    other.load_state_dict(saved)
    del saved["skips"]["retries"]  # as an older version wrote it
    other.load_state_dict(saved)
