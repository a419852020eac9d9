"""Whose settings count: the config that a script used last. And what was said about it already."""

import contextlib
import logging
import threading

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..config import add_amp_config, check_cfg, holds, unused_amp_keys
from ..data.register import register_datasets
from ..keys import DEFAULTS
from ..lazy import cfg_of, warn_of_unused

logger = logging.getLogger("d2amp_ext")

# What a whole Detectron2 config has. A file that was read, or a part of a config, does not have all of it.
_SECTIONS = {"MODEL", "SOLVER", "DATASETS", "DATALOADER", "INPUT", "TEST", "OUTPUT_DIR"}


class _Settings(threading.local):
    """What belongs to a thread: whether calls of `note` come from this package itself."""

    quiet = False


installed = False
trust = False
_mine = _Settings()
_source = None  # CfgNode or DictConfig that was used last
_converted = (None, None)  # a DictConfig and what it says in our keys
_told = set()
touched = set()  # kinds of things that a script used: "config", "trainer", "model"


def start(with_trust):
    """Called by `install`."""
    global installed, trust
    installed, trust = True, with_trust


def reset():
    """Forgets everything; called by `uninstall`."""
    global installed, trust, _source, _converted
    installed, trust, _source, _converted = False, False, None, (None, None)
    _told.clear()
    touched.clear()


def is_config(value):
    """Whether a value is a whole config of Detectron2, of either kind."""
    if isinstance(value, DictConfig):
        return "train" in value and "model" in value
    return isinstance(value, dict) and hasattr(value, "merge_from_list") and _SECTIONS <= value.keys()


def note(source):
    """Makes `source`, if it is a whole config, the one that counts from here on."""
    global _source, _converted
    if installed and not _mine.quiet and is_config(source):
        _source, _converted = source, (None, None)
        touched.add("config")


def adopt(cfg):
    """Adds our keys to a config of the script's own making that lacks them, frozen or not."""
    if type(cfg) is not CfgNode and all(holds(cfg, key) for key in DEFAULTS):
        return
    frozen = cfg.is_frozen()
    if frozen:
        cfg.defrost()
    add_amp_config(cfg)
    if frozen:
        cfg.freeze()


def prepare(source):
    """Notes a config, checks the values of our keys, and registers its data sets. Again and again is fine.

    Args:
        source (CfgNode or DictConfig): anything else is left alone.

    Returns:
        CfgNode or None: what it says in our keys.

    Raises:
        UserError: for values that cannot work.
    """
    if not is_config(source):
        return None
    note(source)
    cfg = _in_our_keys(source)
    check_cfg(cfg)
    register_datasets(cfg)
    return cfg


def latest():
    """The config that was used last, as it is, or None."""
    return _source


def settings(source=None):
    """The CfgNode of `source`, else of the config that was used last, else None."""
    source = _source if source is None else source
    return None if source is None else _in_our_keys(source)


def _in_our_keys(source):
    global _converted
    if isinstance(source, CfgNode) or not isinstance(source, DictConfig):
        adopt(source)
        return source
    if _converted[0] is not source:
        with quietly():
            _converted = (source, cfg_of(source))
    return _converted[1]


@contextlib.contextmanager
def quietly():
    """A context in which configs that are made count for nobody but their maker."""
    before, _mine.quiet = _mine.quiet, True
    try:
        yield
    finally:
        _mine.quiet = before


def warn_unused(source):
    """Names, once, the keys that were set although AMP is off."""
    cfg = settings(source)
    unused = tuple(unused_amp_keys(cfg))
    if not unused or ("unused", unused) in _told:
        return
    _told.add(("unused", unused))
    if isinstance(source, DictConfig):
        warn_of_unused(cfg)
    else:
        logger.warning(f"SOLVER.AMP.ENABLED is False: {', '.join(unused)} have no effect.")


def tell(text, level=logging.INFO):
    """Logs a line that was not logged yet since `install`."""
    if text not in _told:
        _told.add(text)
        logger.log(level, text)
