"""What attacks on the package brought to light, by module. Tests that say "Found" failed before the bug was mended."""

import concurrent.futures
import io
import math
import multiprocessing
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from conftest import TinyModel, tiny_data
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from d2amp_ext import (
    AMPTrainer,
    NonFiniteError,
    PrecisionCheckpointer,
    PrecisionPolicy,
    PrecisionTrainer,
    ScalerOptions,
    UnknownKeyError,
    UserError,
    add_amp_config,
    amp_step,
    load_cfg,
)
from d2amp_ext.checkpoint import CheckpointError
from d2amp_ext.config import check_cfg, get_key
from d2amp_ext.keys import DEFAULTS

INF, NAN = math.inf, math.nan

# Models and losses that are not what one expects


class Model(nn.Module):
    """Returns what a function makes of a number with a graph."""

    def __init__(self, make, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 1).to(dtype)
        self.make, self.dtype = make, dtype

    def forward(self, batch):
        return self.make(self.linear(batch[0]["x"].to(self.dtype)).float().mean())


def train(model, steps=3, optimizer=None, data=None, precision="fp32", **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=8.0), max_consecutive_skips=1)
    trainer = AMPTrainer(model, data or tiny_data(), optimizer, policy=policy, **options)
    trainer.train(0, steps)
    return trainer


def total(trainer):
    return [value for value, _ in trainer.storage.history("total_loss").values()]


PLAIN = {"a": lambda y: y**2, "b": lambda y: y.abs()}
LOSSES = {
    "a plain tensor": lambda y: y**2 + y.abs(),
    "one element each": lambda y: {"a": (y**2)[None], "b": y.abs()[None]},  # Found: they could not be stacked
    "a plain tensor of one element": lambda y: (y**2 + y.abs())[None],  # Found
    "of one and no dimensions": lambda y: {"a": (y**2).reshape(1, 1), "b": y.abs()},  # Found
    "float64": lambda y: {"a": y.double() ** 2, "b": y.abs()},
    "float64 alone": lambda y: y.double() ** 2 + y.double().abs(),
    "bfloat16 and float32": lambda y: {"a": y**2, "b": y.abs(), "c": torch.zeros((), dtype=torch.bfloat16)},
    "an integer": lambda y: {"a": y**2, "b": y.abs(), "count": torch.tensor(0)},
    "a small integer": lambda y: {"a": y**2, "b": y.abs(), "count": torch.tensor(0, dtype=torch.int8)},
    "a bool": lambda y: {"a": y**2, "b": y.abs(), "flag": torch.tensor(False)},
    "a constant": lambda y: {"a": y**2, "b": y.abs(), "c": torch.zeros(())},
    "many": lambda y: {"a": y**2, **{str(i): y.abs() / 16 for i in range(16)}},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_every_kind(kind, precision):
    ours = train(Model(LOSSES[kind]), precision=precision)
    expected = train(Model(lambda y: {name: make(y) for name, make in PLAIN.items()}), precision=precision)
    assert ours.last_step.skips == 0 and total(ours) == pytest.approx(total(expected), rel=1e-3)
    for a, b in zip(ours.model.parameters(), expected.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert all(value.dtype is torch.float32 and value.dim() == 0 for value in ours.last_step.losses.values())


def test_detectron2_trains_on_them_too():
    """Why these are no mistakes: the stock trainer takes them."""
    from detectron2.engine import SimpleTrainer

    for kind in LOSSES:
        model = Model(LOSSES[kind])
        stock = SimpleTrainer(model, tiny_data(), torch.optim.SGD(model.parameters(), lr=0.1))
        stock.train(0, 3)
        assert total(train(Model(LOSSES[kind]))) == pytest.approx(total(stock), rel=1e-6)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes(dtype, window):
    """Found: a parameter of 64 bit ended the first step with an error about dtypes."""
    trainer = train(Model(lambda y: {"a": y**2}, dtype), accumulate_steps=window)
    assert trainer.last_step.skips == 0 and trainer.last_step.grad_norm.dtype is torch.float32
    assert trainer.model.linear.weight.dtype is dtype


@pytest.mark.parametrize("made", [None, [torch.zeros((), requires_grad=True)], 3.0, "loss"])
def test_a_model_that_returns_no_losses(made):
    """Found: the message was about a missing attribute of NoneType."""
    with pytest.raises(UserError, match=f"returned {type(made).__name__}; in training it must return a loss"):
        train(Model(lambda y: made))


NO_GRADIENT = {
    "no loss at all": lambda y: {},  # Found: an error about int
    "a loss without a graph": lambda y: {"a": y.detach()},  # Found: an error of autograd
    "constants": lambda y: {"a": torch.tensor(1.0), "b": torch.tensor(2)},
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", NO_GRADIENT)
def test_losses_without_a_gradient_are_skips_and_end_the_run_when_there_are_too_many(kind, precision):
    with pytest.raises(NonFiniteError, match="no parameter has a gradient.*frozen") as error:
        train(Model(NO_GRADIENT[kind]), precision=precision)
    assert (error.value.record.cause, error.value.record.iteration) == ("no_gradient", 1)
    assert error.value.record.scale.item() == (8.0 if precision == "fp16" else 1.0)


def test_one_batch_without_a_gradient_is_one_skip():
    counts = iter(range(9))
    trainer = train(Model(lambda y: {} if next(counts) == 1 else {"a": y**2}), steps=4)
    assert (trainer.last_step.skips, trainer.last_step.skips_in_row) == (1, 0)


def empty_optimizer():
    return torch.optim.SGD([{"params": []}], lr=0.1)


@pytest.mark.parametrize("case", ["frozen", "empty optimizer", "no parameters"])
def test_nothing_to_train(case):
    model = Model(lambda y: {"a": y**2})
    if case == "frozen":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    if case == "no parameters":
        model = nn.Sequential()
        model.forward = lambda batch: {"a": batch[0]["x"].mean()}
    optimizer = None if case == "frozen" else empty_optimizer()
    with pytest.raises(NonFiniteError, match="no parameter has a gradient"):
        train(model, optimizer=optimizer)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_groups_with_different_settings_each_keep_theirs(precision):
    model = Model(lambda y: {"a": y * 4.0})
    groups = [{"params": [model.linear.weight], "lr": 0.0, "momentum": 0.9}, {"params": [model.linear.bias], "lr": 0.5}]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, steps=1, optimizer=torch.optim.SGD(groups, lr=0.1), precision=precision)
    assert torch.equal(model.linear.weight, before[0])
    torch.testing.assert_close(model.linear.bias.detach(), before[1] - 0.5 * 4.0)


def test_sparse_gradients():
    """Embeddings: a row that the window did not touch keeps its value; a spoiled row makes a skip."""
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    policy = PrecisionPolicy("fp32").resolve("cpu")
    before = embedding.weight.detach().clone()
    record = amp_step(embedding(torch.tensor([1, 1, 3])).sum(), optimizer, policy=policy, scaler=policy.make_scaler())
    assert record.grad_norm.item() == pytest.approx(math.sqrt(3 * 4 + 3))
    assert torch.equal(embedding.weight[[0, 2, 4]], before[[0, 2, 4]]) and not torch.equal(embedding.weight[1], before[1])
    optimizer.zero_grad()
    loss = (embedding(torch.tensor([2])) * INF).sum()
    assert amp_step(loss, optimizer, policy=policy, scaler=policy.make_scaler()).skipped
    assert embedding.weight.isfinite().all()


@pytest.mark.parametrize("window, count", [(1, 2), (2, 5), (3, 4)])
def test_a_loader_that_ends_ends_the_run_as_in_detectron2_and_a_started_window_is_no_update(window, count):
    model = TinyModel()
    trainer = AMPTrainer(model, tiny_data(count), torch.optim.SGD(model.parameters(), 0.1), 20, policy=PrecisionPolicy("fp32"),
                         accumulate_steps=window)  # fmt: skip
    with pytest.raises(StopIteration):
        trainer.train(0, 10)
    assert trainer.last_step.iteration == count // window - 1
    assert len(total(trainer)) == count // window  # what was done is written


def good_step(**options):
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=8.0)).resolve("cpu")
    model = TinyModel()
    given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "policy": policy, "scaler": policy.make_scaler(), **options}
    return model, given


def test_an_iterator_that_ends_early():
    """Found: a StopIteration came out of amp_step, which ends a generator or loop around it in silence."""
    model, given = good_step()
    with pytest.raises(UserError, match="ended after 1 of 2 micro-batches"):
        amp_step((model(batch) for batch in tiny_data(1)), **given, micro_batches=2)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_hook_that_raises_does_not_spoil_the_next_step(error):
    """Found: in a notebook, the next step failed because gradients had been unscaled already."""
    model, given = good_step()

    def fail():
        raise error

    batch = tiny_data(1)[0]
    with pytest.raises(error):
        amp_step(model(batch), **given, after_backward=fail)
    given["optimizer"].zero_grad()
    record = amp_step(model(batch), **given)
    assert not record.skipped and record.scale.item() == 8.0


def test_a_scaler_of_the_users_that_starts_below_the_floor_does_not_rise_on_an_overflow():
    """Found: 0.5 became 1.0."""
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    model = TinyModel()
    trainer = AMPTrainer(model, tiny_data(4, spoil={1, 2}), torch.optim.SGD(model.parameters(), 0.1), grad_scaler=scaler)
    trainer.train(0, 4)
    assert trainer.last_step.skips == 2 and scaler.get_scale() == 0.5


# Values that travel


def far_away(policy, cfg):
    """In another process: what arrived, and an error on the way back."""
    cfg.merge_from_list(["SOLVER.AMP.PRECISION", "16"])
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        loss = model(tiny_data(1, spoil=[0])[0])
        amp_step(loss, optimizer, policy=policy, scaler=policy.make_scaler(), iteration=7)
    except NonFiniteError as error:
        return policy, policy.dtype, PrecisionPolicy.from_cfg(cfg), cfg, error


def test_policies_cfgs_and_errors_cross_processes():
    """Found: a NonFiniteError could not be unpickled, which breaks a pool of processes."""
    policy = PrecisionPolicy("bf16", scaler=ScalerOptions(init_scale=2.0), nonfinite="raise").resolve("cpu")
    cfg = load_cfg(None, ["SOLVER.AMP.ENABLED", "True"])
    cfg.freeze()
    with pytest.raises(AttributeError):
        cfg.SOLVER.AMP.PRECISION = "fp16"
    cfg.defrost()
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there, dtype, from_cfg, cfg_there, error = pool.submit(far_away, policy, cfg).result(timeout=120)
    assert there == policy and (there.device, there.reason, dtype) == ("cpu", "as configured", torch.bfloat16)
    assert from_cfg == PrecisionPolicy("fp16") and type(cfg_there) is type(cfg)
    assert isinstance(error, NonFiniteError) and error.record.iteration == 7 and error.record.cause == "loss"


@pytest.mark.parametrize("error", [UserError("a"), UnknownKeyError("b"), CheckpointError("c")])
def test_errors_survive_a_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)


# Policies


def test_a_policy_that_is_off_needs_no_device():
    """Found: make_scaler() failed with an error of torch.device."""
    off = PrecisionPolicy.from_cfg(load_cfg())
    assert off.device is None and off.dtype is None and not off.uses_scaler and not off.make_scaler().is_enabled()
    with off.autocast(), off.float32_switches():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ScalerOptions(init_scale="65536"), ["SCALER.INIT_SCALE", "'65536'", "a number"]),
        (lambda: ScalerOptions(growth_factor=None), ["SCALER.GROWTH_FACTOR", "None"]),
        (lambda: ScalerOptions(growth_interval=2.5), ["SCALER.GROWTH_INTERVAL", "2.5", "whole"]),
        (lambda: ScalerOptions(growth_interval=True), ["SCALER.GROWTH_INTERVAL", "True"]),
        (lambda: ScalerOptions(growth_interval=2**70), ["SCALER.GROWTH_INTERVAL", "2^63"]),
        (lambda: ScalerOptions(init_scale=1e39), ["SCALER.INIT_SCALE", "1e+39", "fp32"]),  # is infinite as a tensor
        (lambda: ScalerOptions(init_scale=NAN), ["SCALER.INIT_SCALE", "nan"]),
        (lambda: ScalerOptions(static=1e39), ["SCALER.STATIC", "1e+39", "fp32"]),
        (lambda: ScalerOptions(static=1e-300), ["SCALER.STATIC", "1e-300", "fp32"]),  # is 0
        (lambda: ScalerOptions(min_scale=1e-300), ["SCALER.MIN_SCALE", "1e-300", "fp32"]),
        (lambda: PrecisionPolicy(max_consecutive_skips="20"), ["MAX_CONSECUTIVE_SKIPS", "'20'", "whole"]),
        (lambda: PrecisionPolicy(max_consecutive_skips=2.5), ["MAX_CONSECUTIVE_SKIPS", "2.5", "whole"]),
        (lambda: PrecisionPolicy(scaler={"init_scale": 2.0}), ["SCALER", "ScalerOptions"]),
        (lambda: PrecisionPolicy(scaler=None), ["SCALER", "None"]),
        (lambda: PrecisionPolicy.from_lazy(None), ["train.amp", "None", "mapping"]),
        (lambda: PrecisionPolicy.from_lazy({"enabled": "False"}), ["train.amp.enabled", "'False'"]),  # Found: was on
        (lambda: PrecisionPolicy.from_lazy({"enabled": True, "scaler": "dynamic"}), ["train.amp.scaler", "'dynamic'"]),
        (lambda: PrecisionPolicy.from_lazy({"enabled": True, "scaler": {"init_scale": "x"}}), ["init_scale", "'x'"]),
    ],
)
def test_wrong_types_and_extremes_are_mistakes_with_a_name(make, words):
    """Found: TypeErrors about comparisons, and values that failed in the first step or never let one through."""
    with pytest.raises(UserError) as error:
        make()
    assert all(word in str(error.value) for word in words)


def test_numpys_numbers_are_numbers():
    options = ScalerOptions(init_scale=np.float32(8), growth_interval=np.int64(3))
    assert PrecisionPolicy("fp16", scaler=options, max_consecutive_skips=np.int32(2)).resolve("cpu").make_scaler().is_enabled()


def test_one_pattern_need_not_be_a_tuple():
    """Found: "backbone" became eight patterns of one letter."""
    assert PrecisionPolicy(fp32_modules="backbone").fp32_modules == ("backbone",)


# Configs

NUMBERS = [key for key, value in DEFAULTS.items() if not isinstance(value, (str, tuple))]


@pytest.mark.parametrize("key", [*DEFAULTS, "SOLVER.AMP.ENABLED", "SOLVER.MAX_ITER", "SOLVER.AMP", "SOLVER.AMP.SCALER", "FAST"])
def test_none_is_no_value(key):
    """Found: yacs takes None for anything, and the comparison after it failed with a TypeError, or later still."""
    with pytest.raises(UserError, match=f"{key} = '?None'?"):
        load_cfg(None, [key, "None"])


def test_none_stays_what_detectron2_makes_of_it_for_its_own_names():
    cfg = load_cfg()
    cfg.merge_from_list(["DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST", 10, "MODEL.WEIGHTS", "None"])
    assert cfg.MODEL.WEIGHTS is None


@pytest.mark.parametrize("key", ["SOLVER.BASE_LR", "SOLVER.AMP.SCALER.INIT_SCALE"])
def test_an_integer_that_no_float_can_hold(key):
    """Found: an OverflowError."""
    with pytest.raises(UserError, match=f"{key} = 9999"):
        load_cfg(None, [key, "9" * 400])


@pytest.mark.parametrize(
    "text, words",
    [
        ("OUTPUT_DIR: 2020-01-01\n", ["OUTPUT_DIR", "date"]),
        ("DATASETS: {TRAIN: !!set {a, b}}\n", ["DATASETS.TRAIN", "set"]),
        ("OUTPUT_DIR: !!binary aGVsbG8=\n", ["OUTPUT_DIR", "bytes"]),
        ("VERSION: 3\n", ["v3"]),
        ("SOLVER: ~\n", ["SOLVER = None", "section"]),
        ("SOLVER: {AMP: ~}\n", ["SOLVER.AMP = None", "section"]),
        ("SOLVER: {AMP: [1]}\n", ["SOLVER.AMP = [1]", "section"]),
        ("SOLVER: {AMP: {PRECISION: {a: 1}}}\n", ["SOLVER.AMP.PRECISION", "section"]),
        ("SOLVER: {AMP: {ENABLED: 1}}\n", ["SOLVER.AMP.ENABLED = 1", "bool"]),
        ("SOLVER: {AMP: {SCALER: {INIT_SCALE: .nan}}}\n", ["INIT_SCALE", "nan"]),
        ("SOLVER: {1: 2}\n", ["SOLVER.1"]),
        ("1: 2\n", ["key 1"]),
        ("SOLVER: &a {AMP: *a}\n", ["cfg.yaml"]),
        ("_BASE_: 3\n", ["_BASE_ = 3"]),
        ("_BASE_: [1]\n", ["_BASE_ = [1]"]),
        ("_BASE_: {a: 1}\n", ["_BASE_ = {'a': 1}"]),
    ],
)
def test_yaml_that_says_something_else(tmp_path, text, words):
    """Found: AssertionErrors, TypeErrors and ValueErrors of yacs, which the command line shows with a traceback."""
    file = tmp_path / "cfg.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_cfg(str(file))
    assert "cfg.yaml" in str(error.value) or "INIT_SCALE" in words
    assert all(word in str(error.value) for word in words)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3), st.complex_numbers(),
    st.sampled_from(["16", "no", "true", "1e999", "nan", "inf", "()", "[]", "{}", "'x'", "0x10", "1_0", "None", "-1", "1e5"]),
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(st.text(max_size=3), inner, max_size=2)))
quick = settings(max_examples=400, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
_LOADED = load_cfg(None, ["SOLVER.AMP.ENABLED", "True"])


@quick
@given(key=st.sampled_from([*DEFAULTS, "SOLVER.AMP.ENABLED", "SOLVER.AMP", "SOLVER.BASE_LR"]), value=values, from_file=st.booleans())
def test_any_value_for_any_key_is_taken_or_a_mistake_with_the_name_of_the_key(key, value, from_file):
    cfg = _LOADED.clone()
    try:
        if from_file:
            node = value
            for part in reversed(key.split(".")):
                node = {part: node}
            cfg.merge_from_other_cfg(CfgNode(node))
        else:
            cfg.merge_from_list([key, value])
    except UserError as error:
        assert key in str(error)
        return
    except AssertionError as error:  # yacs, which makes a CfgNode of every dict
        assert (from_file or isinstance(value, dict)) and "valid type" in str(error)
        return
    kept = get_key(cfg, key)
    if not isinstance(kept, CfgNode):
        default = get_key(_LOADED, key)
        assert type(kept) is type(default) or {type(kept), type(default)} == {list, tuple}
    try:
        check_cfg(cfg)
    except UserError as error:
        assert key.split(".")[1] in str(error)
        return
    policy = PrecisionPolicy.from_cfg(cfg).resolve("cpu")  # what was accepted makes a policy that works
    assert policy.make_scaler().is_enabled() == (policy.precision == "fp16")
    again = pickle.loads(pickle.dumps(cfg))
    assert again == cfg or kept != kept


@pytest.mark.parametrize("name", ["SOLVER", "MONITOR", "FAST"])
def test_a_section_that_another_project_has_made_keeps_its_keys(name):
    cfg = CfgNode({"SOLVER": {"AMP": {"ENABLED": False}}, "TEST": {}, "DATASETS": {}, "DATALOADER": {}})
    cfg[name] = CfgNode({**cfg.get(name, {}), "THEIRS": 3})
    add_amp_config(cfg)
    assert cfg[name].THEIRS == 3 and all(get_key(cfg, key) == value for key, value in DEFAULTS.items())


# Checkpoints


class State:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointer(folder, value=9):
    return PrecisionCheckpointer(TinyModel(value), str(folder), save_to_disk=True, trainer=State(value))


@pytest.fixture
def three(tmp_path):
    for value in (1, 2, 3):
        checkpointer(tmp_path, value).save(f"model_{value:07d}")
    return tmp_path


def resume(folder):
    ours = checkpointer(folder)
    ours.resume_or_load("", resume=True)
    return ours.checkpointables["trainer"].value


POINTERS = {
    "": 3, "model_0000002.pth\n": 2, "  model_0000002.pth ": 2, "model_0000002": 3, "/etc/passwd": 3, "../../model_0000001.pth": 1,
    "http://somewhere/model.pth": 3, "a\0b": 3, "x" * 5000: 3, "\0" * 16: 3,
}  # fmt: skip


@pytest.mark.parametrize("text, value", POINTERS.items(), ids=range(len(POINTERS)))
def test_whatever_the_pointer_says(three, text, value):
    (three / "last_checkpoint").write_text(text)
    assert resume(three) == value


def test_a_pointer_that_is_no_text(three):
    """Found: a UnicodeDecodeError, after a crash that left other bytes in the file."""
    (three / "last_checkpoint").write_bytes(b"\xff\xfe\x80")
    assert resume(three) == 3
    (three / "last_checkpoint").unlink()
    (three / "last_checkpoint").mkdir()
    assert resume(three) == 3


def test_odd_names_beside_the_checkpoints(three):
    for name in ("model_.pth", "model_abc.pth", "model_0000009.pth.tmp12", "MODEL_0000009.pth", "model_0000009.pt", "model_-1.pth",
                 "xmodel_0000009.pth", "model_٣.pth", "model_best.pth", f"model_{'9' * 100}.pth.bak"):  # fmt: skip
        (three / name).write_bytes(b"x")
    (three / "model_0000004.pth").mkdir()
    (three / "last_checkpoint").unlink()
    assert resume(three) == 3


CONTENTS = [[1, 2], torch.ones(2), 3, "model", None, {"model": None}, {"model": [1]}, {"model": {"a": "b"}},
            {"model": {1: torch.ones(1)}}, {"model": torch.ones(1)}, {"a": 1}]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_a_file_that_can_be_read_and_is_no_checkpoint(three, content, caplog):
    """Found: errors about attributes and keys, where the checkpoint before it could have been taken."""
    torch.save(content, three / "model_0000003.pth")
    assert resume(three) == 2
    assert "model_0000003.pth holds" in caplog.text
    with pytest.raises(CheckpointError, match="model_0000003.pth holds"):
        checkpointer(three).load(str(three / "model_0000003.pth"))


def test_a_run_that_was_continued_after_its_end(three):
    """Found: when its last checkpoint was torn, the run went back to the model_final of before."""
    checkpointer(three, 5).save("model_final")
    os.utime(three / "model_final.pth", (time.time() + 10, time.time() + 10))
    for value in (7, 8):
        checkpointer(three, value).save(f"model_{value:07d}")
        os.utime(three / f"model_{value:07d}.pth", (time.time() + 20, time.time() + 20))
    assert resume(three) == 8
    (three / "model_0000008.pth").write_bytes(b"torn")
    assert resume(three) == 7
    (three / "model_0000007.pth").write_bytes(b"torn")
    assert resume(three) == 5


WHOLE = io.BytesIO()
torch.save({"model": TinyModel(5).state_dict(), "trainer": {"value": 5}}, WHOLE)
WHOLE = WHOLE.getvalue()
OLD_FORMAT = io.BytesIO()
torch.save({"model": TinyModel(5).state_dict(), "trainer": {"value": 5}}, OLD_FORMAT, _use_new_zipfile_serialization=False)
OLD_FORMAT = OLD_FORMAT.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@quick
@given(
    damaged=st.one_of(
        st.binary(max_size=40),
        st.builds(lambda part, whole: whole[: int(len(whole) * part)], st.floats(0, 0.999), st.sampled_from([WHOLE, OLD_FORMAT])),
        st.builds(lambda at, byte: OLD_FORMAT[:at] + bytes([byte]) + OLD_FORMAT[at + 1 :], st.integers(0, 300), st.integers(0, 255)),
    )
)
def test_damage_of_any_kind_is_a_checkpoint_error_or_a_whole_checkpoint(tmp_path_factory, damaged):
    """Found: four bytes of rubbish raised an IndexError, which lost the run."""
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    path = folder / "model_0000001.pth"
    path.write_bytes(damaged)
    try:
        checkpointer(folder).load(str(path))
    except CheckpointError as error:
        assert "model_0000001.pth" in str(error)
    else:
        assert len(damaged) == len(OLD_FORMAT)  # a byte that does not matter


# Trainers from a cfg


@pytest.fixture
def config(tmp_path, datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))

    def make(*opts, steps=3, name="run"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        base = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), "SEED", "3", "SOLVER.MAX_ITER", str(steps), "DATASETS.TEST", "()",
                "TEST.EVAL_PERIOD", "0", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "MONITOR.PERIOD", "1"]  # fmt: skip
        return load_cfg("quick/faster_rcnn_micro.yaml", [*base, *opts])

    return make


def seeded(cfg, cls=PrecisionTrainer):
    from detectron2.utils.env import seed_all_rng

    seed_all_rng(cfg.SEED)
    return cls(cfg)


def test_a_trainer_that_makes_another_one(config):
    """Found: a student that makes its teacher while it is made waited for itself, for ever."""

    class Student(PrecisionTrainer):
        @classmethod
        def build_model(cls, cfg):
            cls.teacher = PrecisionTrainer(cfg)
            return super().build_model(cfg)

    made = []
    thread = threading.Thread(target=lambda: made.append(Student(config())), daemon=True)
    thread.start()
    thread.join(30)
    assert made and type(made[0]._trainer) is type(Student.teacher._trainer) is AMPTrainer


def test_twice_from_one_cfg_and_two_at_a_time(config):
    """Neither the cfg nor anything global is used up: both give the losses of a trainer that is alone."""
    cfg = config()
    cfg.freeze()
    before = cfg.clone()
    switches = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    alone = seeded(cfg)
    alone.train()
    expected = total(alone)
    assert cfg == before
    first = seeded(cfg)
    first.train()
    second, third = seeded(cfg), seeded(cfg)
    third.train()
    assert total(first) == total(third) == expected and second.last_step is None
    second.train()
    assert second.last_step.iteration == 2
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == switches


def test_before_there_is_an_inner_trainer(config):
    """Found: hasattr(trainer, "_trainer") raised a KeyError while the trainer was made."""
    seen = []

    class Early(PrecisionTrainer):
        @classmethod
        def build_model(cls, cfg):
            bare = cls.__new__(cls)
            seen.extend([hasattr(bare, "_trainer"), hasattr(bare, "checkpointer"), hasattr(bare, "model")])
            return super().build_model(cfg)

    Early(config())
    assert seen == [False, False, False]


def test_the_record_after_a_resume(config):
    first = seeded(config("SOLVER.CHECKPOINT_PERIOD", "2"))
    first.train()
    again = seeded(config(steps=5))
    again.resume_or_load(resume=True)
    assert again.last_step is None and again.start_iter == 3  # the step just made is not that of another process
    again.train()
    assert (again.last_step.iteration, again.last_step.skips) == (4, 0)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_resume_with_fewer_updates_than_are_done(config, steps, caplog):
    """Found: it ended at once and said nothing."""
    seeded(config("SOLVER.CHECKPOINT_PERIOD", "2")).train()
    again = seeded(config(steps=steps))
    again.resume_or_load(resume=True)
    before = {name: value.clone() for name, value in again.model.state_dict().items()}
    again.train()
    assert f"Nothing to train: 3 updates are done and SOLVER.MAX_ITER is {steps}" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in again.model.state_dict().items())
    assert torch.load(os.path.join(again.cfg.OUTPUT_DIR, "model_final.pth"), weights_only=True)["iteration"] == 2


def test_a_frozen_model_and_a_stock_trainer_beside_ours(config):
    """What we exchange while a trainer is made is Detectron2's again afterwards."""
    from detectron2.engine import defaults

    before = defaults.create_ddp_model
    seeded(config())
    assert defaults.create_ddp_model is before

    class Broken(PrecisionTrainer):
        @classmethod
        def build_model(cls, cfg):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Broken(config())
    assert defaults.create_ddp_model is before
    cfg = config("SOLVER.AMP.ENABLED", "False")
    assert type(DefaultTrainer(cfg)._trainer).__module__.startswith("detectron2")
