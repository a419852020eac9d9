"""What tests share: a tiny model that follows Detectron2's contract, and runs of the command line."""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  (torch imports it late, and it refuses to come after the standard distutils)

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent


class TinyModel(nn.Module):
    """Returns two losses in training. Takes [{"x": Tensor (N, 8)}]; a "spoil" entry multiplies the losses."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, batch):
        x = torch.cat([sample["x"] for sample in batch])
        y = self.second(torch.relu(self.first(x))).float()
        losses = {"loss_a": (y - 1).pow(2).mean(), "loss_b": y.abs().mean()}
        factor = batch[0].get("spoil", 1.0)
        return {name: loss * factor for name, loss in losses.items()}


def tiny_data(count=40, spoil=(), factor=float("inf"), size=4):
    """A list of batches of one sample; those whose number is in `spoil` make the losses not finite."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        sample = {"x": torch.randn(size, 8, generator=generator), "file_name": f"image_{number}.png"}
        if number in spoil:
            sample["spoil"] = factor
        batches.append([sample])
    return batches


@pytest.fixture
def tiny():
    """A function that makes (model, optimizer) from the same start every time."""

    def make(lr=0.1, optimizer=torch.optim.SGD, **options):
        model = TinyModel()
        return model, optimizer(model.parameters(), lr=lr, **options)

    return make


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory):
    """One data folder for all tests of the session, with the sample data made once."""
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="session")
def run_tool(datasets_dir):
    """Runs a Python script or module of this checkout in a process of its own, as a user does.

    `run_tool("tools/train_net.py", "--config-file", ..., cwd=...)` returns the CompletedProcess with text output.
    """

    def run(script, *args, cwd, timeout=240, env=None, check=None):
        command = [sys.executable, *(["-m", script] if "/" not in script else [str(ROOT / script)]), *map(str, args)]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "DETECTRON2_DATASETS": str(datasets_dir),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        done = subprocess.run(command, cwd=cwd, timeout=timeout, env=variables, capture_output=True, text=True)
        if check is not None:
            assert done.returncode == check, f"{command}\nexit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    return run


def stock_script(name):
    """The path of one of Detectron2's own training scripts, or None where the installed Detectron2 lacks them."""
    import detectron2

    places = [Path(detectron2.__file__).parent.parent / "tools" / name]
    for distribution in ("sal-detectron2", "detectron2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.files(distribution) or []
            places += [Path(file.locate()) for file in files if file.as_posix().endswith(f"tools/{name}")]
    return next((str(place.resolve()) for place in places if place.is_file()), None)


def lazy_sampler(seed=42):
    """Overrides by which a LazyConfig of the sample shapes draws in the order of the YAML road.

    Detectron2's newer YAML loaders seed their sampler with SEED; those of LazyConfigs draw a seed, as older ones do.
    """
    import inspect

    from detectron2.data import build

    if "TrainingSampler(len(dataset), seed=cfg.SEED)" not in inspect.getsource(build._train_loader_from_config):
        return []
    from d2amp_ext.data import shapes

    shapes.register()
    size = len(build.get_detection_dataset_dicts("d2amp_shapes_train"))
    sampler = "dataloader.train.sampler"
    return [f"{sampler}._target_=detectron2.data.samplers.TrainingSampler", f"{sampler}.size={size}", f"{sampler}.seed={seed}"]


@pytest.fixture
def here(tmp_path, monkeypatch, datasets_dir, fresh_loggers):
    """An empty working directory, and the data folder of the session."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    return tmp_path


@pytest.fixture
def fresh_loggers():
    """Detectron2 sets a logger up once a process and keeps its streams: forget them before and after a test."""
    import logging

    from detectron2.utils import logger

    def forget():
        logger.setup_logger.cache_clear()
        logger._cached_log_stream.cache_clear()
        for name in ("detectron2", "fvcore", "d2amp_ext"):
            kept = logging.getLogger(name)
            kept.handlers.clear()
            kept.setLevel(logging.NOTSET)
            kept.propagate = True

    forget()
    yield
    forget()
