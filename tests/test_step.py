import copy

import pytest
import torch
from conftest import TinyModel, tiny_data

from d2amp_ext import NonFiniteError, PrecisionPolicy, ScalerOptions, StepRecord, amp_step

INF, NAN = float("inf"), float("nan")


def make(precision="fp16", optimizer=torch.optim.SGD, lr=0.1, **options):
    policy = PrecisionPolicy(precision, **options).resolve("cpu")
    model = TinyModel()
    return policy, policy.make_scaler(), model, optimizer(model.parameters(), lr=lr)


def losses_of(policy, model, batch):
    with policy.autocast():
        return model(batch)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["off", "fp32", "tf32", "bf16", "fp16"])
def test_a_good_step_is_what_a_plain_loop_does(precision):
    policy, scaler, model, optimizer = make(precision, scaler=ScalerOptions(init_scale=64.0))
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batch = tiny_data(1)[0]
    losses = losses_of(policy, plain, batch)
    sum(losses.values()).backward()
    plain_optimizer.step()
    record = amp_step(losses_of(policy, model, batch), optimizer, policy=policy, scaler=scaler, iteration=3)
    tolerance = {"fp16": 1e-3, "bf16": 1e-6}.get(precision, 0)  # the scale rounds fp16 gradients elsewhere
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert record == record and (record.iteration, record.skipped, record.cause, record.skips) == (3, False, None, 0)
    assert record.losses.keys() == losses.keys() and not record.losses["loss_a"].requires_grad
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    torch.testing.assert_close(record.grad_norm, norm, rtol=1e-2, atol=0)
    assert record.scale.item() == (64.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [INF, NAN, -INF])
def test_a_loss_that_is_not_finite_is_skipped_in_every_precision(precision, factor):
    policy, scaler, model, optimizer = make(precision)
    before = weights(model)
    batch = tiny_data(1, spoil=[0], factor=factor)[0]
    record = amp_step(losses_of(policy, model, batch), optimizer, policy=policy, scaler=scaler)
    assert (record.skipped, record.cause, record.skips, record.skips_in_row) == (True, "loss", 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert not optimizer.state


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_hook_that_spoils_a_gradient_makes_a_skip(precision):
    policy, scaler, model, optimizer = make(precision)
    before = weights(model)

    def spoil():
        model.first.weight.grad[0, 0] = NAN

    record = amp_step(
        losses_of(policy, model, tiny_data(1)[0]), optimizer, policy=policy, scaler=scaler, after_backward=spoil
    )
    assert record.cause == "gradient" and not torch.isfinite(record.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert scaler.get_scale() == (32768.0 if precision == "fp16" else 1.0)


def test_after_backward_sees_unscaled_gradients():
    policy, scaler, model, optimizer = make("fp16", scaler=ScalerOptions(init_scale=64.0))
    seen = []
    losses = losses_of(policy, model, tiny_data(1)[0])
    reference = torch.autograd.grad(sum(losses.values()), list(model.parameters()), retain_graph=True)
    amp_step(losses, optimizer, policy=policy, scaler=scaler,
             after_backward=lambda: seen.extend(p.grad.clone() for p in model.parameters()))  # fmt: skip
    for ours, true in zip(seen, reference):
        torch.testing.assert_close(ours, true, rtol=1e-2, atol=1e-3)


def test_large_finite_gradients_whose_squares_overflow_are_no_skip():
    policy, scaler, model, optimizer = make("fp32", lr=1e-30)
    parameter = next(model.parameters())
    loss = (parameter * 1e25).sum()
    record = amp_step(loss, optimizer, policy=policy, scaler=scaler)
    assert not record.skipped and parameter.grad.isfinite().all() and torch.isinf(record.grad_norm)


def test_a_step_without_gradients_is_an_event_and_no_crash(caplog):
    policy, scaler, model, optimizer = make("fp16", scaler=ScalerOptions(init_scale=64.0))
    loss = torch.ones((), requires_grad=True) * 2
    record = amp_step(loss, optimizer, policy=policy, scaler=scaler)
    assert record.skipped and record.cause == "no_gradient" and record.grad_norm is None
    assert "no parameter has a gradient" in caplog.text and scaler.get_scale() == 64.0
    assert not amp_step(losses_of(policy, model, tiny_data(1)[0]), optimizer, policy=policy, scaler=scaler).skipped


def test_a_forward_that_raises_counts_as_a_loss_that_is_not_finite(caplog):
    policy, scaler, model, optimizer = make("fp16")

    def forward():
        raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        yield

    record = amp_step(forward(), optimizer, policy=policy, scaler=scaler, micro_batches=1)
    assert record.cause == "forward" and record.losses == {} and record.grad_norm is None
    assert scaler.get_scale() == 32768.0 and "Predicted boxes" in caplog.text


def run(spoil, count=12, **options):
    policy, scaler, model, optimizer = make("fp16", **options)
    record, scales = None, []
    for iteration, batch in enumerate(tiny_data(count, spoil)):
        optimizer.zero_grad()
        record = amp_step(losses_of(policy, model, batch), optimizer, policy=policy, scaler=scaler,
                          iteration=iteration, previous=record)  # fmt: skip
        scales.append(scaler.get_scale())
    return record, scales, scaler


def test_the_scale_backs_off_grows_and_counts_like_torch():
    options = ScalerOptions(init_scale=64.0, growth_interval=3)
    record, scales, scaler = run({2, 3}, scaler=options)
    assert scales == [64.0, 64.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 64.0, 64.0, 64.0]
    assert (record.skips, record.skips_in_row) == (2, 0)
    reference = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in tiny_data(12, {2, 3}):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = sum(model(batch).values())
        reference.scale(loss).backward()
        reference.step(optimizer)
        reference.update()
        expected.append(reference.get_scale())
    assert scales == expected


def test_the_scale_never_falls_below_its_floor():
    _, scales, _ = run({0, 1, 2, 3, 4}, scaler=ScalerOptions(init_scale=8.0, min_scale=3.0, growth_interval=100))
    assert scales[:5] == [4.0, 3.0, 3.0, 3.0, 3.0]


def test_a_static_scale_stays_and_still_skips():
    record, scales, scaler = run({4}, scaler=ScalerOptions(static=128.0, growth_interval=2))
    assert set(scales) == {128.0} and record.skips == 1
    assert scaler.state_dict()["growth_factor"] == 2.0


def test_too_many_skips_in_a_row_end_the_run_with_everything_one_needs():
    with pytest.raises(FloatingPointError) as error:
        run(range(40), count=40, max_consecutive_skips=3)
    record = error.value.record
    assert isinstance(error.value, NonFiniteError) and record.skips_in_row == 4 and record.iteration == 3
    text = str(error.value)
    for word in ("iteration 3", "MAX_CONSECUTIVE_SKIPS = 3", "fp16", "gradient scale 8192", "loss_a", "Try"):
        assert word in text


def test_skips_that_are_not_in_a_row_go_on():
    record, _, _ = run(range(0, 12, 2), max_consecutive_skips=1)
    assert record.skips == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_raise_stops_in_the_step(precision):
    policy, scaler, model, optimizer = make(precision, nonfinite="raise")
    losses = losses_of(policy, model, tiny_data(1, [0])[0])
    with pytest.raises(NonFiniteError, match="NONFINITE is 'raise'"):
        amp_step(losses, optimizer, policy=policy, scaler=scaler, context="Learning rate 0.1.")


def test_a_window_is_the_mean_of_its_micro_batches():
    """Two micro-batches of two samples give the update of one batch of four, to fp32 rounding."""
    policy, scaler, model, optimizer = make("fp32")
    other = copy.deepcopy(model)
    batch = tiny_data(1)[0][0]["x"]
    halves = [[{"x": batch[:2]}], [{"x": batch[2:]}]]
    record = amp_step((model(half) for half in halves), optimizer, policy=policy, scaler=scaler, micro_batches=2)
    whole = amp_step(other([{"x": batch}]), torch.optim.SGD(other.parameters(), lr=0.1), policy=policy, scaler=scaler)
    for ours, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for name in record.losses:
        torch.testing.assert_close(record.losses[name], whole.losses[name], rtol=1e-6, atol=1e-7)


def test_low_precision_losses_are_summed_in_fp32():
    policy, scaler, model, optimizer = make("bf16")
    parameter = next(model.parameters())
    terms = {str(i): (parameter.sum() * 0 + 1).bfloat16() * (256.0 if i == 0 else 1.0) for i in range(5)}
    record = amp_step(terms, optimizer, policy=policy, scaler=scaler)
    assert sum(value.item() for value in record.losses.values()) == 260.0
    assert all(value.dtype is torch.float32 for value in record.losses.values())


def clipped(kind, value):
    class Clipping(torch.optim.SGD):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            if kind == "value":
                torch.nn.utils.clip_grad_value_(parameters, value)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, value)
            return super().step(closure)

    return Clipping


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [65536.0, 1024.0])
def test_clipping_inside_the_optimizer_acts_on_true_gradients(fused, scale):
    """Value clipping at 1.0 of a true gradient of 0.5 must move the parameter by lr x 0.5, whatever the scale."""
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=scale)).resolve("cpu")
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = clipped("value", 1.0)([parameter], lr=0.1, fused=fused)
    amp_step((parameter * 0.5).sum(), optimizer, policy=policy, scaler=policy.make_scaler())
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.05))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fused_and_unfused_optimizers_reach_the_same_weights(kind, precision):
    results = []
    for fused in (False, True):
        policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=1024.0)).resolve("cpu")
        model, scaler, record = TinyModel(), policy.make_scaler(), None
        optimizer = kind(model.parameters(), lr=0.01, fused=fused)
        for batch in tiny_data(8, spoil={3}):
            optimizer.zero_grad()
            record = amp_step(losses_of(policy, model, batch), optimizer, policy=policy, scaler=scaler, previous=record)
        assert record.skips == 1
        results.append(weights(model))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_read_a_step_and_a_record_that_holds_no_graph():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "_local_scalar_dense" in str(function)
            return function(*args, **(kwargs or {}))

    policy, scaler, model, optimizer = make("fp16", scaler=ScalerOptions(init_scale=16.0))
    amp_step(losses_of(policy, model, tiny_data(1)[0]), optimizer, policy=policy, scaler=scaler)
    losses = losses_of(policy, model, tiny_data(1)[0])
    with Reads() as reads:
        record = amp_step(losses, optimizer, policy=policy, scaler=scaler)
    assert reads.count == 0  # .tolist() of the flags is the one read, and no .item() besides
    assert isinstance(record, StepRecord) and all(v.grad_fn is None for v in record.losses.values())
