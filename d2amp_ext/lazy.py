"""LazyConfigs: loading one, and what its `train` node says in our keys."""

import contextlib
import difflib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from detectron2.config import LazyConfig, get_cfg
from omegaconf import OmegaConf

from .config import add_amp_config, check_cfg, unused_amp_keys
from .config_files import find_config
from .errors import UnknownKeyError, UserError
from .keys import DEFAULTS

logger = logging.getLogger(__name__)

# A section of the `train` node -> the prefix of its keys in YAML. The names in it are those in lower case.
SECTIONS = {"amp": "SOLVER.AMP.", "eval_amp": "TEST.AMP.", "fast": "FAST.", "monitor": "MONITOR."}
# Other settings -> where they are in YAML.
_SINGLE = {
    "train.accumulate_steps": "SOLVER.ACCUMULATE_STEPS",
    "train.float32_precision": "FLOAT32_PRECISION",
    "train.output_dir": "OUTPUT_DIR",
    "train.device": "MODEL.DEVICE",
    "train.seed": "SEED",
    "train.max_iter": "SOLVER.MAX_ITER",
    "train.eval_period": "TEST.EVAL_PERIOD",
    "train.checkpointer.period": "SOLVER.CHECKPOINT_PERIOD",
    "train.init_checkpoint": "MODEL.WEIGHTS",
    "dataloader.train.total_batch_size": "SOLVER.IMS_PER_BATCH",
    "dataloader.train.dataset.names": "DATASETS.TRAIN",
    "dataloader.test.dataset.names": "DATASETS.TEST",
    "model.roi_heads.num_classes": "MODEL.ROI_HEADS.NUM_CLASSES",
    "model.num_classes": "MODEL.RETINANET.NUM_CLASSES",
    "model.input_format": "INPUT.FORMAT",
    "optimizer.lr": "SOLVER.BASE_LR",
}
_KNOWN = ("SOLVER.AMP.ENABLED", *DEFAULTS)
_TO_ADD = " To add a new one, write +{}=..."


def load_lazy(config_file, overrides=(), *, trust=False):
    """A LazyConfig with overrides. Reading a Python file runs it.

    Args:
        config_file (str): a path, a packaged config or a name in Detectron2's zoo, that ends in .py.
        overrides (sequence[str]): in Hydra's grammar, such as "train.amp.precision=bf16".
        trust (bool): whether a LazyConfig that was saved as YAML, whose tags can run code, is read, too.

    Returns:
        DictConfig

    Raises:
        UserError: for a file or an override that cannot be used; UnknownKeyError for names under `train` that are not
            in the file. `+train.name=value` adds one.
    """
    if not config_file:
        raise UserError("--config-file is missing. Name a LazyConfig, such as quick/faster_rcnn_micro.py.")
    filename = find_config(config_file)
    if "://" not in filename:
        filename = os.path.abspath(filename)  # what it imports is looked up from its folder
    if not filename.endswith(".py") and not trust:
        raise UserError(
            f"The config {filename} is not a .py file. For a Detectron2 YAML config use d2amp train. A LazyConfig that was "
            "saved as YAML can run code when it is read: pass --trust when you know where it comes from."
        )
    try:
        config = LazyConfig.load(filename)
    except Exception as error:  # it is a program, and may fail in any way
        raise UserError(f"The config {filename} cannot be loaded: {type(error).__name__}: {error}") from error
    for name in ("model", "train", "optimizer", "dataloader", "lr_multiplier"):
        if name not in config:
            raise UserError(
                f"The config {filename} has no `{name}`. A LazyConfig for training defines model, optimizer, "
                "lr_multiplier, dataloader and train; start from quick/faster_rcnn_micro.py or one of Detectron2's."
            )
    return _overridden(config, list(overrides))


def _overridden(config, overrides):
    for number, override in enumerate(overrides):
        name, equals, _ = override.partition("=")
        if not equals:
            pair = f"{lazy_name(name)}={overrides[number + 1]}" if name.isupper() and overrides[number + 1 :] else None
            hint = f" Write {pair}." if pair else ""
            raise UserError(f"The override {override!r} has no `=`. A LazyConfig takes key=value.{hint}")
        if name.startswith("train."):
            _check_exists(config, name)
        elif name[:1] not in "+~" and name.split(".")[0] not in config:
            raise _unknown(name, [*config, *(f"train.{key}" for key in _flat(config.train))], _TO_ADD.format(name))
    try:
        return LazyConfig.apply_overrides(config, overrides)
    except UserError:
        raise
    except Exception as error:  # Hydra and OmegaConf have errors of their own
        raise UserError(f"The overrides {' '.join(overrides)} cannot be applied: {error}") from error


def _check_exists(config, name):
    """Detectron2 adds whatever is written; what nobody reads is a misspelling."""
    known = [f"train.{key}" for key in _flat(config.train)] + [key for key in _SINGLE if key.startswith("train.")]
    known += [lazy_name(key) for key in _KNOWN if lazy_name(key).startswith("train.")]
    section = name.split(".")[1]
    if name in known or any(key.startswith(f"{name}.") for key in known):
        return
    if section in SECTIONS:
        known = [key for key in known if key.startswith(f"train.{section}.")]
    raise _unknown(name, known, "" if section in SECTIONS else _TO_ADD.format(name))


def _flat(node, path=""):
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        yield f"{path}{name}"


def _unknown(name, known, advice=""):
    near = difflib.get_close_matches(name.lower(), sorted(set(known)), n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(sorted(set(known)))}."
    return UnknownKeyError(f"Unknown key {name}.{hint}{advice}")


def config_text(config):
    """A LazyConfig as text that `load_lazy` reads again with `trust`; "" where it holds what YAML cannot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        LazyConfig.save(config, str(path))
        return "" if path.with_suffix(".yaml.pkl").exists() or not path.exists() else path.read_text(encoding="utf-8")


def cfg_of(config):
    """What a LazyConfig says in our keys, and in those of Detectron2 that go with them, as a checked CfgNode.

    Everything behind the config reads settings from it, as in a run from YAML. Names that the `train` node leaves out
    have their defaults, so that Detectron2's own `common/train.py` is fine.

    Args:
        config (DictConfig): with `train`, and `dataloader` where it has one.

    Raises:
        UnknownKeyError: for a name in one of our sections that is not ours, with the nearest match.
        UserError: for a value that cannot work. Messages have the names of the LazyConfig.
    """
    train = config.train
    cfg = get_cfg()
    add_amp_config(cfg)
    cfg.setdefault("FLOAT32_PRECISION", "")  # an older Detectron2 does not have it
    pairs = []
    for section, prefix in SECTIONS.items():
        known = [key for key in _KNOWN if key.startswith(prefix)]
        pairs += _pairs(train.get(section) or {}, f"train.{section}", prefix, known)
    for name, key in _SINGLE.items():
        value = OmegaConf.select(config, name)
        if value is not None and not isinstance(value, Mapping):  # a LazyCall: known only when it is called
            pairs.append((key, _fitting(key, value)))
    # Detectron2's names of meta architectures are those of classes; an unknown one is not judged by its class count.
    target = config.model.get("_target_", "")
    pairs.append(("MODEL.META_ARCHITECTURE", getattr(target, "__name__", str(target).split(".")[-1])))
    with lazy_names():
        for key, value in pairs:
            cfg.merge_from_list([key, value])
        check_cfg(cfg)
    return cfg


def _fitting(key, value):
    value = tuple(value) if _is_list(value) else value
    return (value,) if key.startswith("DATASETS.") and isinstance(value, str) else value


@contextlib.contextmanager
def lazy_names():
    """A context in which a UserError names settings as a LazyConfig does."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key in sorted((*_KNOWN, *_SINGLE.values()), key=len, reverse=True):
            name = lazy_name(key)
            text = text.replace(f"{key} ({name})", name)
            text = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w.]\w)", name, text)
        raise type(error)(text) from error


def warn_of_unused(cfg):
    """Names, in one warning, the settings that were made although AMP is off."""
    unused = unused_amp_keys(cfg)
    if unused:
        logger.warning(f"train.amp.enabled is False: {', '.join(map(lazy_name, unused))} have no effect.")


def lazy_name(key):
    """The name of a YAML key in a LazyConfig: SOLVER.AMP.SCALER.STATIC is train.amp.scaler.static."""
    for section, prefix in SECTIONS.items():
        if key.startswith(prefix):
            return f"train.{section}.{key[len(prefix):].lower()}"
    return next((name for name, single in _SINGLE.items() if key == single), key)


def _pairs(node, path, prefix, known):
    if not isinstance(node, Mapping):
        raise UserError(f"{path} = {node!r}: must be a mapping with names such as {lazy_name(known[0])}.")
    pairs = []
    for name, value in node.items():
        key = prefix + str(name).upper()
        below = [other for other in known if other.startswith(f"{key}.")]
        if below and str(name).islower():
            pairs += _pairs(value, f"{path}.{name}", f"{key}.", below)
        elif key in known and str(name).islower():
            pairs.append((key, tuple(value) if _is_list(value) else value))
        else:
            raise _unknown(f"{path}.{name}", [lazy_name(other) for other in known])
    return pairs


def _is_list(value):
    return not isinstance(value, (str, Mapping)) and hasattr(value, "__iter__")
