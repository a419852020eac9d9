"""Whatever goes wrong in whatever order: weights stay finite, counts add up, the scale keeps within its bounds.

The model is made of a few numbers, so that hypothesis can try many runs; two real ranks run at the end.
"""

import math
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import TinyModel, tiny_data
from detectron2.utils.events import EventStorage
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2amp_ext import AMPTrainer, NonFiniteError, PrecisionPolicy, ScalerOptions, amp_step

INF, NAN = math.inf, math.nan


def quick(examples):
    """The same examples in every run, without a clock."""
    return settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


# What can happen to a micro-batch, and to the gradients of a window in a hook; "" is nothing.
FORWARD = {"": None, "inf loss": "loss", "nan loss": "loss", "-inf loss": "loss", "raise": "forward", "no graph": "no_gradient",
           "nan gradient": "gradient", "inf gradient": "gradient"}  # fmt: skip
HOOK = {"": None, "nan": "gradient", "inf": "gradient"}
# Of several in one window: the order in which they come to light.
WORST = ["forward", "no_gradient", "loss", "gradient"]


class Spoiled(torch.autograd.Function):
    """A finite number whose gradient is not."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return torch.full_like(upstream, ctx.gradient), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)  # never gets a gradient
        self.frozen = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.frozen.requires_grad_(False)

    def forward(self, sample):
        x, event = sample
        if event == "raise":
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        y = (self.linear(x) + self.frozen(x)).float().mean()
        if event == "no graph":
            y = y.detach()
        elif event.endswith("gradient"):
            y = Spoiled.apply(y, NAN if event.startswith("nan") else INF)
        elif event.endswith("loss"):
            y = y * float(event.split()[0])
        return {"loss_a": (y - 0.5) ** 2, "loss_b": 0.1 * y.abs()}


def batch(number, event):
    generator = torch.Generator().manual_seed(number)
    return torch.rand(3, 4, generator=generator), event


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "two groups": lambda parameters: torch.optim.SGD(
        [{"params": parameters[:1], "lr": 0.1, "momentum": 0.9}, {"params": parameters[1:], "weight_decay": 0.1}], lr=0.01
    ),
}


def frozen_copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: frozen_copy(item) for key, item in value.items()}
    return [frozen_copy(item) for item in value] if isinstance(value, list) else value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


windows = st.integers(1, 3)
options = st.builds(
    ScalerOptions,
    init_scale=st.sampled_from([4.0, 64.0, 65536.0]),
    growth_interval=st.integers(1, 4),
    min_scale=st.sampled_from([1.0, 3.0]),
    backoff_factor=st.sampled_from([0.5, 0.25]),
    static=st.sampled_from([0.0, 0.0, 8.0]),
)


@st.composite
def runs(draw):
    window = draw(windows)
    forward = st.sampled_from([""] * 8 * window + list(FORWARD))
    update = st.tuples(st.lists(forward, min_size=window, max_size=window), st.sampled_from([""] * 10 + list(HOOK)))
    return window, draw(st.lists(update, min_size=1, max_size=8))


def expected_cause(events, hook):
    causes = {FORWARD[event] for event in events} | {HOOK[hook]}
    for event in events:  # the first of these ends the window: what comes after it is not reached
        if FORWARD[event] in ("forward", "no_gradient"):
            return FORWARD[event]
    return next((cause for cause in WORST if cause in causes), None)


class Scale:
    """What the scale must be, told in a few lines."""

    def __init__(self, options):
        self.options, self.value, self.good = options, options.static or options.init_scale, 0

    def after(self, cause):
        if self.options.static or cause == "no_gradient":
            return
        if cause is not None:
            self.value, self.good = max(self.value * self.options.backoff_factor, self.options.min_scale), 0
            return
        self.good += 1
        if self.good == self.options.growth_interval:
            self.value, self.good = self.value * self.options.growth_factor, 0


# A good update, a skip, two good ones: the growth of the scale starts to count again after a skip.
@example((1, [([""], ""), (["nan loss"], ""), ([""], ""), ([""], "")]), "fp16", ScalerOptions(4.0, growth_interval=2), "sgd", 4, False, 1)
@quick(300)
@given(
    run=runs(),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    scaler=options,
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    most=st.integers(0, 4),
    zero_first=st.booleans(),
    period=st.integers(1, 3),
)
def test_whatever_happens(run, precision, scaler, optimizer, most, zero_first, period):
    window, updates = run
    model = Model()
    made = OPTIMIZERS[optimizer]([*model.linear.parameters(), *model.unused.parameters()])
    policy = PrecisionPolicy(precision, scaler=scaler, max_consecutive_skips=most)
    numbers = iter(range(1000))
    data = [batch(next(numbers), event) for events, _ in updates for event in events]
    trainer = AMPTrainer(model, data, made, period, zero_first, policy=policy, accumulate_steps=window)

    def hook():
        if updates[trainer.iter][1]:
            model.linear.bias.grad.fill_(float(updates[trainer.iter][1]))

    trainer.after_backward = hook
    scale, skips, in_row, gave_up = Scale(scaler), 0, 0, False
    with EventStorage(0) as trainer.storage:
        for trainer.iter, (events, spoiled) in enumerate(updates):
            trainer.storage.iter = trainer.iter
            before = frozen_copy(model.state_dict()), frozen_copy(made.state_dict())
            used = scale.value if precision == "fp16" else 1.0
            try:
                trainer.run_step()
            except NonFiniteError as error:
                gave_up = True
                assert error.record is trainer.last_step and "MAX_CONSECUTIVE_SKIPS" in str(error)
            record, cause = trainer.last_step, expected_cause(events, spoiled)
            if precision == "fp16" and cause is None and record.cause == "gradient":
                cause = "gradient"  # a real overflow
            assert record.cause == cause and record.skipped == (cause is not None) and record.iteration == trainer.iter
            # Counts
            skips, in_row = (skips + 1, in_row + 1) if cause else (skips, 0)
            assert (record.skips, record.skips_in_row) == (skips, in_row) and gave_up == (in_row > most)
            # Weights and optimizer
            assert all(parameter.isfinite().all() for parameter in model.parameters())
            after = model.state_dict(), made.state_dict()
            if cause:
                assert same(before[0], after[0]) and same(before[1], after[1])
            else:
                assert not torch.equal(before[0]["linear.weight"], after[0]["linear.weight"])
            # The scale
            assert record.scale.item() == used
            if precision == "fp16":
                scale.after(cause)
                assert trainer.grad_scaler.get_scale() == scale.value
                assert trainer.grad_scaler.state_dict()["growth_factor"] == 2.0
                assert (scaler.static or min(scaler.min_scale, scaler.init_scale)) <= scale.value <= 65536.0 * 2**8
            else:
                assert not trainer.grad_scaler.is_enabled() and trainer.state_dict()["grad_scaler"]["scale"] == scaler.init_scale
            # The record
            assert (record.grad_norm is None) == (cause in ("forward", "no_gradient"))
            assert all(value.dtype is torch.float32 and not value.requires_grad for value in record.losses.values())
            assert record.losses.keys() == {"loss_a", "loss_b"} or window > 1 or cause in ("forward", "no_gradient")
            if gave_up:
                break
        trainer.flush_metrics(gather=False)
        for name, history in trainer.storage.histories().items():
            iterations = [iteration for _, iteration in history.values()]
            assert iterations == sorted(set(iterations)) and all(math.isfinite(value) for value, _ in history.values())
        written = trainer.storage.histories().get("total_loss")
        assert len(written.values() if written else []) >= trainer.iter + 1 - skips  # no good step is left out


def plain_loop(policy, window, count, optimizer, left_out=()):
    """The updates of a loop without a guard, in the same precision; some are left out. torch's own scaler scales."""
    model = Model()
    made = OPTIMIZERS[optimizer]([*model.linear.parameters(), *model.unused.parameters()])
    scaler, numbers = policy.make_scaler(), iter(range(1000))
    for update in range(count):
        batches = [batch(next(numbers), "") for _ in range(window)]
        if update in left_out:
            continue
        made.zero_grad()
        for sample in batches:
            with policy.autocast():
                losses = model(sample)
            loss = sum(losses.values())
            scaler.scale(loss / window if window > 1 else loss).backward()
        scaler.step(made)
        scaler.update()
    return model


@quick(100)
@given(
    window=windows,
    count=st.integers(1, 6),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    faults=st.sets(st.integers(0, 5), max_size=3),
    fault=st.sampled_from(["nan loss", "nan gradient", "raise", "no graph"]),
    zero_first=st.booleans(),
)
def test_the_updates_that_are_made_are_those_of_a_plain_loop(window, count, precision, optimizer, faults, fault, zero_first):
    """Bit for bit: with no fault all of them, and with faults as if the spoiled batches had never been there."""
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=4.0, growth_interval=1000)).resolve("cpu")
    model = Model()
    made = OPTIMIZERS[optimizer]([*model.linear.parameters(), *model.unused.parameters()])
    numbers = iter(range(1000))
    data = []
    for update in range(count):
        events = [""] * window
        if update in faults:
            events[-1] = fault
        data += [batch(next(numbers), event) for event in events]
    trainer = AMPTrainer(model, data, made, 1, zero_first, policy=policy, accumulate_steps=window)
    with EventStorage(0) as trainer.storage:
        for trainer.iter in range(count):
            trainer.run_step()
    assert trainer.last_step.skips == len({update for update in faults if update < count})
    expected = plain_loop(policy, window, count, optimizer, left_out=faults)
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        if precision == "fp16" and faults and fault != "no graph":  # another scale rounds other bits
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(ours, theirs)


@quick(80)
@given(run=runs(), cut=st.integers(1, 7), precision=st.sampled_from(["fp32", "fp16"]), scaler=options)
def test_a_run_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(run, cut, precision, scaler):
    window, updates = run
    cut = min(cut, len(updates))

    def start(begin):
        model = Model()
        made = OPTIMIZERS["momentum"]([*model.linear.parameters(), *model.unused.parameters()])
        data = [batch(window * number + k, event) for number, (events, _) in enumerate(updates) for k, event in enumerate(events)]
        policy = PrecisionPolicy(precision, scaler=scaler, max_consecutive_skips=100)
        return AMPTrainer(model, data[begin * window :], made, policy=policy, accumulate_steps=window)

    def go(trainer, begin, end):
        causes = []
        with EventStorage(begin) as trainer.storage:
            for trainer.iter in range(begin, end):
                trainer.run_step()
                causes.append((trainer.last_step.cause, trainer.last_step.skips, trainer.last_step.skips_in_row))
        return causes

    whole = start(0)
    expected = go(whole, 0, len(updates))
    first = start(0)
    found = go(first, 0, cut)
    second = start(cut)
    second.model.load_state_dict(frozen_copy(first.model.state_dict()))
    second.load_state_dict(frozen_copy(first.state_dict()))
    assert second.iter == cut - 1 and second.last_step is None
    found += go(second, cut, len(updates))
    assert found == expected
    assert same(whole.model.state_dict(), second.model.state_dict())
    if cut < len(updates):
        assert same(whole.state_dict(), second.state_dict())


@quick(100)
@given(
    exponents=st.lists(st.integers(-40, 38), min_size=2, max_size=6),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    scale=st.sampled_from([1.0, 65536.0]),
)
def test_gradients_of_every_size_are_judged_by_their_values(exponents, precision, scale):
    """Neither a norm whose squares overflow nor one that vanishes makes a skip; a gradient that overflows does."""
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=scale)).resolve("cpu")
    parameter = nn.Parameter(torch.zeros(len(exponents)))
    optimizer = torch.optim.SGD([parameter], lr=1e-30)
    true = torch.tensor([10.0**exponent for exponent in exponents])
    record = amp_step((parameter * true).sum(), optimizer, policy=policy, scaler=policy.make_scaler())
    used = scale if precision == "fp16" else 1.0
    overflows = bool(torch.isinf(true * used).any())
    assert record.cause == ("gradient" if overflows else None)
    assert parameter.isfinite().all()
    norm = math.sqrt(sum(10.0 ** (2 * exponent) for exponent in exponents))
    if 1e-18 < norm < 1e18:
        assert record.grad_norm.item() == pytest.approx(norm, rel=1e-3)


# Two ranks


CASES = {
    "plain": {"events": {}, "window": 2},
    "static graph": {"events": {}, "window": 2, "ddp": {"static_graph": True}},
    "static graph, raise": {"events": {1: "raise"}, "window": 1, "ddp": {"static_graph": True}},
    "no gradient": {"events": {2: "no graph"}, "window": 1},
    "no gradient in a window": {"events": {3: "no graph", 8: "no graph"}, "window": 2},
    "both": {"events": {2: "no graph"}, "others": {2: "raise"}, "window": 1},
    "without DDP": {"events": {2: "no graph"}, "window": 1, "ddp": None},
}


class Ranked(TinyModel):
    def forward(self, batch):
        event = batch[0].get("spoil")
        if event == "raise":
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        if event == "no graph":
            return {"loss_a": torch.ones(()), "loss_b": torch.ones(())}
        return super().forward(batch)


def rank_case(rank, events, window, others=(), ddp=()):
    model = Ranked()
    wrapped = model if ddp is None else DistributedDataParallel(model, **dict(ddp))
    data = tiny_data(24)[12 * rank :] + tiny_data(12)
    for number, event in (events if rank == 1 else dict(others)).items():
        data[number][0]["spoil"] = event
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=64.0))
    trainer = AMPTrainer(wrapped, data, optimizer, policy=policy, accumulate_steps=window)
    causes = []
    with EventStorage(0) as trainer.storage:
        for trainer.iter in range(6):
            trainer.run_step()
            causes.append(trainer.last_step.cause)
    return {"causes": causes, "scale": trainer.grad_scaler.get_scale(), "weights": [p.detach() for p in model.parameters()]}


def rank_worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({name: rank_case(rank, **case) for name, case in CASES.items()}, f"{folder}/rank{rank}.pth")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_worker, args=(folder,), nprocs=2, start_method="spawn")
        return [torch.load(f"{folder}/rank{rank}.pth") for rank in range(2)]


@pytest.mark.parametrize(
    "name, causes, scale",
    [
        ("plain", [None] * 6, 64.0),
        ("static graph", [None] * 6, 64.0),
        ("static graph, raise", [None, "forward", None, None, None, None], 32.0),
        ("no gradient", [None, None, "no_gradient", None, None, None], 64.0),
        ("no gradient in a window", [None, "no_gradient", None, None, "no_gradient", None], 64.0),
        ("both", [None, None, "forward", None, None, None], 32.0),
        ("without DDP", [None, None, "no_gradient", None, None, None], 64.0),
    ],
)
def test_two_ranks_agree(ranks, name, causes, scale):
    """Found: a rank whose loss had no gradient died, and the other waited for it; DDP's static graph failed in windows."""
    first, second = (rank[name] for rank in ranks)
    assert first["causes"] == second["causes"] == causes
    assert first["scale"] == second["scale"] == scale
    for a, b in zip(first["weights"], second["weights"]):
        assert a.isfinite().all() and (torch.equal(a, b) or name == "without DDP")


def test_a_static_graph_gives_the_same_updates(ranks):
    for a, b in zip(ranks[0]["plain"]["weights"], ranks[0]["static graph"]["weights"]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
