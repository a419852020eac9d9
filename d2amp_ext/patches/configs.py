"""Configs of unedited code: they know our keys, and the one used last is the one that counts."""

import logging

from detectron2.config.defaults import _C
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from .. import _compat
from ..config import add_amp_config
from ..data.register import register_named
from ..lazy import cfg_of
from . import current


def cloning(stock):
    """Of CfgNode.clone, by which `get_cfg` copies Detectron2's defaults. These stay as they are: another thread may be
    copying them just now."""

    def clone(self):
        copied = stock(self)
        if self is _C:
            add_amp_config(copied)
        return copied

    return clone


def merging(name):
    """The replacement of `merge_from_file` and the like of CfgNode: a config of one's own gets our keys first."""

    def make(stock):
        def merge(self, *args, **kwargs):
            if not current.is_config(self):
                return stock(self, *args, **kwargs)
            kind = type(self)
            if not self.is_frozen():
                current.adopt(self)
            if type(self) is not kind:  # our spellings hold from here on
                return getattr(self, name)(*args, **kwargs)
            result = stock(self, *args, **kwargs)
            current.note(self)
            return result

        return merge

    return make


def merging_files(stock):
    """Of AmpCfgNode.merge_from_file: `install(trust=True)` allows YAML tags that run code."""

    def merge_from_file(self, cfg_filename, allow_unsafe=None):
        return stock(self, cfg_filename, allow_unsafe=current.trust if allow_unsafe is None else allow_unsafe)

    return merge_from_file


def loading(stock):
    """Of LazyConfig.load."""

    def load(filename, keys=None):
        config = stock(filename, keys)
        current.note(config)
        return config

    return staticmethod(load)


def overriding(stock):
    """Of LazyConfig.apply_overrides: names of ours that do not exist are refused, which Detectron2 would just add."""

    def apply_overrides(cfg, overrides):
        config = stock(cfg, overrides)
        current.note(config)
        if current.is_config(config):
            with current.quietly():
                cfg_of(config)
        return config

    return staticmethod(apply_overrides)


def setting_up(stock):
    """Of default_setup: the config is checked before anything is built, and our log goes into its log file, too."""

    def default_setup(cfg, args):
        ours = current.prepare(cfg)
        result = stock(cfg, args)
        if ours is not None:
            _log_to(ours.OUTPUT_DIR)
            current.warn_unused(cfg)
        return result

    return default_setup


def _log_to(folder):
    """Adds our lines to the log file of a run; the console has them once."""
    options = {"configure_stdout": not logging.getLogger("d2amp_ext").handlers}
    options = _compat.supported_kwargs(setup_logger, options)
    setup_logger(folder, distributed_rank=comm.get_rank(), name="d2amp_ext", **options)


def getting_data(stock):
    """Of the `get` of Detectron2's catalogs: our sets are registered when they are asked for."""

    def get(self, name):
        if name not in self.data:
            cfg = current.settings()
            register_named(name, cfg.DATASETS.REGISTER if cfg is not None else ())
        return stock(self, name)

    return get
