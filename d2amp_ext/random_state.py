"""The random states of a process, as plain types and tensors that `torch.load(weights_only=True)` reads."""

import random

import numpy as np
import torch


def capture():
    """The states of Python's, numpy's and torch's global generators, GPUs included.

    Returns:
        dict: tensors, numbers, strings and lists only.
    """
    return plain(snapshot())


def snapshot():
    """The same in the form that costs least, for every step: what `plain` turns into what `capture` returns."""
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    gpus = torch.cuda.get_rng_state_all() if has_gpu else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus


def plain(states):
    """What `capture` returns, from a `snapshot`."""
    (version, words, gauss), (name, keys, position, has_gauss, cached), of_torch, gpus = states
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": of_torch,
    }
    return state if gpus is None else {**state, "cuda": gpus}


def restore(state):
    """Puts back what `capture` returned. States of GPUs that are not there are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
