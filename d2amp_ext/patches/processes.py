"""Processes that a script starts are installed, too; and a script that runs in one process runs in torchrun's."""

import importlib
import sys

import torch.distributed as dist

from ..launch import torchrun_worker, under_torchrun
from . import current


class InstalledTarget:
    """What a child process runs: `install` first, then what it was made for."""

    def __init__(self, target, trust):
        self.target = target
        self.trust = trust

    def __call__(self, *args, **kwargs):
        package = importlib.import_module(__package__.partition(".")[0])
        package.install(trust=self.trust)
        _note_all((*args, *kwargs.values()))
        return self.target(*args, **kwargs)


def _note_all(values):
    """A config that comes with the arguments is the one that counts."""
    for value in values:
        if type(value) in (list, tuple):
            _note_all(value)
        else:
            current.note(value)


def process_init(stock):
    """Of BaseProcess.__init__. Workers of data loaders train nothing and are left alone."""

    def __init__(self, group=None, target=None, *args, **kwargs):
        module = getattr(target, "__module__", None) or ""
        if target is not None and not module.startswith("torch.utils.data"):
            target = InstalledTarget(target, current.trust)
            current.touched.add("process")
        stock(self, group, target, *args, **kwargs)

    return __init__


def launching(stock):
    """Of Detectron2's launch. What torchrun started becomes one run, as `d2amp train` makes it."""

    def launch(main_func, num_gpus_per_machine, *args, **kwargs):
        if not under_torchrun() or dist.is_initialized():
            return stock(main_func, num_gpus_per_machine, *args, **kwargs)
        arguments = kwargs.get("args", args[3] if len(args) > 3 else ())
        return torchrun_worker(lambda _: main_func(*arguments), None)

    return launch


def ddp_init(stock):
    """Of DistributedDataParallel.__init__: on CPUs it takes no `device_ids`, which Detectron2 always passes."""

    def __init__(self, module, *args, **kwargs):
        if kwargs.get("device_ids") and all(p.device.type == "cpu" for p in module.parameters()):
            kwargs["device_ids"] = None
        stock(self, module, *args, **kwargs)

    return __init__
