import random

import numpy as np
import pytest
import torch

from d2amp_ext import random_state


def draw():
    """Numbers of every kind that training draws, some of which leave half of a pair for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.sample(range(100), 3),
        np.random.rand(3).tolist(),
        np.random.randn(),  # odd numbers of normals: numpy caches the second of a pair
        np.random.permutation(5).tolist(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(5).tolist(),
    ]


@pytest.fixture(autouse=True)
def _seeded():
    before = random_state.capture()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    yield
    random_state.restore(before)


@pytest.mark.parametrize("warm_up", [0, 1, 2, 7])
def test_what_was_captured_comes_back(warm_up):
    for _ in range(warm_up):
        draw()
    state = random_state.capture()
    first = [draw() for _ in range(5)]
    draw()
    random_state.restore(state)
    assert [draw() for _ in range(5)] == first
    random_state.restore(state)  # once more: restoring does not use the state up
    assert draw() == first[0]


def test_capturing_draws_nothing():
    first = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed({random.seed: 1, np.random.seed: 2, torch.manual_seed: 3}[seed])
    random_state.capture()
    assert draw() == first


def test_a_checkpoint_of_it_is_read_with_weights_only(tmp_path):
    random.gauss(0, 1)
    np.random.randn()
    state = random_state.capture()
    torch.save({"ranks": [{"random": state}]}, tmp_path / "x.pth")
    expected = draw()
    loaded = torch.load(tmp_path / "x.pth", weights_only=True)["ranks"][0]["random"]
    random_state.restore(loaded)
    assert draw() == expected


def test_states_are_copies():
    state = random_state.capture()
    kept = {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in state.items()}
    draw()
    assert torch.equal(state["torch"], kept["torch"]) and state["python"] == kept["python"]
    assert torch.equal(state["numpy"][1], kept["numpy"][1])


def test_without_a_gpu_there_is_no_gpu_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(random_state.capture()) == {"python", "numpy", "torch"}


def test_a_gpu_that_nobody_used_is_not_started(monkeypatch):
    """Making a CUDA context in every process takes hundreds of MiB, and a data loader's worker cannot do it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("initialises CUDA"))
    assert "cuda" not in random_state.capture()


def test_states_of_gpus(monkeypatch):
    """Three were there; a machine with two takes two of them, one without takes none, and the rest comes back anyway."""
    three = [torch.tensor([number], dtype=torch.uint8) for number in range(3)]
    put_back = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: three)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put_back.update({device: state.item()}))
    state = random_state.capture()
    assert state["cuda"] == three
    expected = draw()
    random_state.restore(state)
    assert put_back == {0: 0, 1: 1} and draw() == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    put_back.clear()
    random_state.restore(state)
    assert put_back == {} and draw() == expected
