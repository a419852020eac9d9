"""`install` and `uninstall`: the one table of what is exchanged in Detectron2, and how it is put back.

Classes, registries and functions are changed in place and names in modules never, so that copies of names, made by
`from detectron2.engine import AMPTrainer` long before, are served as well.
"""

import contextlib
import multiprocessing.process
import threading
import types

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, default_setup, launch
from detectron2.modeling import META_ARCH_REGISTRY
from torch.nn.parallel import DistributedDataParallel

from ..config import AmpCfgNode
from ..data.register import forget, registered_names
from . import configs, current, loops, models, processes, trainers, updates

# Object, attribute, and a function from what it was to what takes its place.
ATTRIBUTES = [
    (CfgNode, "clone", configs.cloning),
    (CfgNode, "merge_from_file", configs.merging("merge_from_file")),
    (CfgNode, "merge_from_list", configs.merging("merge_from_list")),
    (CfgNode, "merge_from_other_cfg", configs.merging("merge_from_other_cfg")),
    (AmpCfgNode, "merge_from_file", configs.merging_files),
    (LazyConfig, "load", configs.loading),
    (LazyConfig, "apply_overrides", configs.overriding),
    (type(DatasetCatalog), "get", configs.getting_data),
    (type(MetadataCatalog), "get", configs.getting_data),
    (META_ARCH_REGISTRY, "get", models.getting_architecture),
    (TrainerBase, "__init__", trainers.trainer_base_init),
    (DefaultTrainer, "__init__", trainers.default_trainer_init),
    (DefaultTrainer, "auto_scale_workers", trainers.scaling_workers),
    (DefaultTrainer, "test", models.evaluating),
    (SimpleTrainer, "__init__", trainers.inner_trainer_init(SimpleTrainer)),
    (AMPTrainer, "__init__", trainers.inner_trainer_init(AMPTrainer)),
    (DetectionCheckpointer, "__init__", trainers.checkpointer_init),
    (torch.amp.GradScaler, "__init__", loops.scaler_init),
    (DistributedDataParallel, "__init__", processes.ddp_init),
    (multiprocessing.process.BaseProcess, "__init__", processes.process_init),
]
# Functions, which keep their identity and get other code.
FUNCTIONS = [
    (default_setup, configs.setting_up),
    (launch, processes.launching),
]
# Contexts for what is no attribute.
CONTEXTS = [loops.forgetting, models.serving, updates.watching]

_ABSENT = object()
_lock = threading.RLock()
_undo = None  # an ExitStack while installed
_in_place = {}  # name of a function -> what its code calls


def install(*, trust=False):
    """Makes unedited Detectron2 code in this process, and in those that it starts, use this package.

    `get_cfg` knows the keys of docs/keys.md, DefaultTrainer and its subclasses work as with PrecisionTrainerMixin, an
    AMPTrainer that a script makes is ours, and a model trained in a loop of the script's own runs in the precision of
    its config. SOLVER.AMP.ENABLED (or train.amp.enabled) stays the switch. Calling it twice is fine.

    Args:
        trust (bool): whether config files and weights may run code when they are read.
    """
    global _undo
    with _lock:
        if _undo is not None:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(current.reset)
            stack.enter_context(_datasets())
            for context in CONTEXTS:
                stack.enter_context(context())
            for owner, name, make in ATTRIBUTES:
                stack.enter_context(_attribute(owner, name, make))
            for function, make in FUNCTIONS:
                stack.enter_context(_function(function, make))
            current.start(trust)
            _undo = stack.pop_all()


def uninstall():
    """Puts everything back that `install` changed. Trainers that were made in between stay what they are."""
    global _undo
    with _lock:
        if _undo is not None:
            _undo, stack = None, _undo
            stack.close()


def is_installed():
    return _undo is not None


@contextlib.contextmanager
def _attribute(owner, name, make):
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def _function(function, make):
    before = {name: getattr(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
    stock = types.FunctionType(before["__code__"], function.__globals__, function.__name__, before["__defaults__"])
    stock.__kwdefaults__ = before["__kwdefaults__"]
    _in_place[function.__name__] = make(stock)
    function.__defaults__ = function.__kwdefaults__ = None  # before the code, which has no place for them
    function.__code__ = _forwarding(function.__name__)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(function, name, value)
        del _in_place[function.__name__]


def _forwarding(name):
    """The code of a function that passes all on to the replacement. It runs among the globals of another module."""
    text = (
        f"def {name}(*args, **kwargs):\n"
        f"    import sys\n"
        f"    return sys.modules[{__name__!r}]._in_place[{name!r}](*args, **kwargs)\n"
    )
    namespace = {}
    exec(compile(text, __file__, "exec"), namespace)
    return namespace[name].__code__


@contextlib.contextmanager
def _datasets():
    before = registered_names()
    try:
        yield
    finally:
        forget(registered_names() - before)
