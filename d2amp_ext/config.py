"""Configs with the keys of d2amp_ext: a CfgNode that is kind to people who type them."""

import difflib
import logging

from detectron2.config import CfgNode, get_cfg
from detectron2.utils.file_io import PathManager

from .config_files import find_config, read_yaml
from .errors import UnknownKeyError, UserError
from .keys import DEFAULTS, NOT_YET
from .policy import PrecisionPolicy, parse_precision

logger = logging.getLogger(__name__)

_PRECISION_KEYS = ("SOLVER.AMP.PRECISION", "TEST.AMP.PRECISION")
_BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def add_amp_config(cfg):
    """Adds the keys of d2amp_ext to a Detectron2 CfgNode, in place.

    A key that is there already keeps its value, so calling it twice changes nothing. From then on `merge_from_file`
    and `merge_from_list` of this cfg accept the spellings of docs/design.md (`PRECISION 16`, `ENABLED true`, an integer
    for a float), resolve packaged and zoo names in `_BASE_`, run no code from YAML unless `allow_unsafe=True` is
    passed, and name the nearest match of a misspelt key. A subclass of CfgNode from another project stays what it is
    and gets the keys only.
    """
    for key, default in DEFAULTS.items():
        node = cfg
        *path, name = key.split(".")
        for part in path:
            if part not in node:
                setattr(node, part, CfgNode())
            node = node[part]
            if not isinstance(node, dict):
                raise UserError(f"The config has {part} = {node!r}, where d2amp_ext has a section with {key}. Rename that key.")
        if name not in node:
            setattr(node, name, default)
    if type(cfg) is CfgNode:
        # yacs compares exact types when it merges, so only the root can change its class.
        object.__setattr__(cfg, "__class__", AmpCfgNode)


def load_cfg(config_file=None, opts=(), *, trust=False):
    """Detectron2's defaults, our keys, a config file and overrides, checked.

    Args:
        config_file (str or None): a path, a packaged config or a name in Detectron2's zoo; None or "" for none.
        opts (sequence): KEY, VALUE, KEY, VALUE ...
        trust (bool): whether YAML tags that run Python code are allowed.

    Returns:
        CfgNode: not frozen.

    Raises:
        UserError: for every mistake; UnknownKeyError for keys that do not exist.
    """
    cfg = read_cfg(config_file, opts, trust=trust)
    check_cfg(cfg)
    return cfg


def read_cfg(config_file=None, opts=(), *, trust=False):
    """As `load_cfg`, without the checks of values: for who changes some first."""
    cfg = get_cfg()
    add_amp_config(cfg)
    if config_file:
        cfg.merge_from_file(config_file, allow_unsafe=trust)
    cfg.merge_from_list(list(opts))
    return cfg


def check_cfg(cfg):
    """Raises UserError for values of our keys that cannot work, whatever the device and the data."""
    for key in _PRECISION_KEYS:
        parse_precision(get_key(cfg, key), key)
    policy = PrecisionPolicy.from_amp_node(cfg.SOLVER.AMP)
    fp32_precision = cfg.get("FLOAT32_PRECISION", "")
    conflicts = {"fp32": ("high", "medium"), "tf32": ("highest",)}
    if cfg.SOLVER.AMP.ENABLED and fp32_precision in conflicts.get(policy.precision, ()):
        raise UserError(
            f"SOLVER.AMP.PRECISION = {cfg.SOLVER.AMP.PRECISION!r} contradicts FLOAT32_PRECISION = {fp32_precision!r}. "
            'Set FLOAT32_PRECISION "" and let PRECISION decide.'
        )
    steps = cfg.SOLVER.ACCUMULATE_STEPS
    if steps < 1:
        raise UserError(f"SOLVER.ACCUMULATE_STEPS = {steps}: must be 1 or more micro-batches per update.")
    if steps > 1 and not cfg.SOLVER.AMP.ENABLED:
        raise UserError(
            f"SOLVER.ACCUMULATE_STEPS = {steps} needs our trainer, and SOLVER.AMP.ENABLED is False. "
            "Set SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION fp32."
        )
    if cfg.MONITOR.PERIOD < 0:
        raise UserError(f"MONITOR.PERIOD = {cfg.MONITOR.PERIOD}: must be 0 (off) or a number of iterations.")
    for key, values in NOT_YET.items():
        if get_key(cfg, key) not in values:
            allowed = " or ".join(repr(value) for value in values if value != [])
            raise UserError(f"{key} = {get_key(cfg, key)!r} is not supported in this version. Set it to {allowed}.")


def holds(cfg, key):
    """Whether a config has a dotted key."""
    for part in key.split("."):
        if not isinstance(cfg, dict) or part not in cfg:
            return False
        cfg = cfg[part]
    return True


def unused_amp_keys(cfg):
    """The SOLVER.AMP keys that were set although SOLVER.AMP.ENABLED is False."""
    if cfg.SOLVER.AMP.ENABLED:
        return []
    return [key for key in DEFAULTS if key.startswith("SOLVER.AMP.") and get_key(cfg, key) != DEFAULTS[key]]


def get_key(cfg, key):
    """The value of a dotted key."""
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


class AmpCfgNode(CfgNode):
    """A root CfgNode after `add_amp_config`. Its sub-nodes stay Detectron2's CfgNode."""

    @classmethod
    def load_yaml_with_base(cls, filename, allow_unsafe=False):
        return read_yaml(filename, trust=allow_unsafe)

    @classmethod
    def _create_config_tree_from_dict(cls, dic, key_list):
        return CfgNode._create_config_tree_from_dict(dic, key_list)

    @classmethod
    def _decode_cfg_value(cls, value):
        return CfgNode._decode_cfg_value(value)

    def merge_from_file(self, cfg_filename, allow_unsafe=False):
        """As in Detectron2, with packaged and zoo names, and safe by default."""
        filename = find_config(cfg_filename)
        try:
            super().merge_from_file(filename, allow_unsafe=allow_unsafe)
        except UserError as error:
            where = "" if filename in str(error) else f"In the config {filename}: "
            raise type(error)(f"{where}{error}") from error.__cause__
        except (AssertionError, TypeError, RecursionError) as error:  # yacs: a date, a set, another VERSION ...
            raise UserError(f"The config {filename} cannot be used: {error}") from error

    def merge_from_other_cfg(self, cfg_other):
        """As in Detectron2, with the accepted spellings."""
        other = CfgNode._create_config_tree_from_dict(dict(cfg_other), [])
        self._prepare(other, self, ())
        return super().merge_from_other_cfg(CfgNode(other))

    def merge_from_list(self, cfg_list):
        """As in Detectron2, with the accepted spellings."""
        cfg_list = list(cfg_list)
        if len(cfg_list) % 2:
            raise UserError(f"Overrides come in pairs of KEY VALUE; {cfg_list[-1]!r} has no partner in: {cfg_list}")
        pairs = []
        for key, value in zip(cfg_list[::2], cfg_list[1::2]):
            if not (self.key_is_renamed(key) or self.key_is_deprecated(key)):
                value = _spelt(key, self._decode_cfg_value(value), self._existing(key))
            pairs += [key, value]
        return super().merge_from_list(pairs)

    def _existing(self, key):
        node = self
        for part in str(key).split("."):
            if not isinstance(node, CfgNode) or part not in node:
                raise _unknown_key(self, key)
            node = node[part]
        return node

    def _prepare(self, other, node, path):
        """Rewrites the values of `other` in place so that yacs takes them for `node`."""
        for name, value in other.items():
            key = ".".join((*path, str(name)))
            if name not in node:
                if not (node.is_new_allowed() or self.key_is_renamed(key) or self.key_is_deprecated(key)):
                    raise _unknown_key(self, key)
            elif isinstance(value, CfgNode) and isinstance(node[name], CfgNode):
                self._prepare(value, node[name], (*path, str(name)))
            else:
                other[name] = _spelt(key, self._decode_cfg_value(value), node[name])


def _spelt(key, value, original):
    """`value` in the type of `original`, where that is what was meant."""
    if isinstance(original, CfgNode):
        example = next(iter(original), "NAME")
        raise UserError(f"{key} = {value!r}: it is a section, and no value. Set its keys, such as {key}.{example}.")
    if isinstance(original, bool) and isinstance(value, str):
        value = _BOOLEANS.get(value.strip().lower(), value)
    elif isinstance(original, float) and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    elif key in _PRECISION_KEYS and not isinstance(value, (str, CfgNode)):
        value = "no" if value is False else str(value)
    elif key in DEFAULTS and isinstance(original, tuple) and isinstance(value, str):
        value = (value,)
    kinds = {type(value), type(original)}
    # yacs takes None for everything. Where a number or a section is needed, it would fail much later.
    none_is_fine = original is None or (value is None and type(original) in (str, list, tuple) and key not in DEFAULTS)
    if len(kinds) > 1 and not none_is_fine and kinds != {list, tuple}:
        raise UserError(
            f"{key} = {value!r} has the wrong type {_kind(value)}. It must be {type(original).__name__}: {original!r}."
        )
    # yacs evaluates strings again: "16" must arrive as a quoted string.
    return repr(value) if isinstance(value, str) and CfgNode._decode_cfg_value(value) != value else value


def _kind(value):
    return "a section" if isinstance(value, CfgNode) else type(value).__name__


def _unknown_key(cfg, key):
    known = list(_flatten(cfg, ()))
    near = difflib.get_close_matches(str(key).upper(), known, n=1, cutoff=0.6)
    if str(key).startswith("-"):
        hint = " Flags come before the first KEY VALUE pair."
    else:
        hint = f" Did you mean {near[0]}?" if near else " See docs/keys.md for the keys of d2amp_ext."
    return UnknownKeyError(f"Unknown config key {key}.{hint}")


def _flatten(node, path):
    for name, value in node.items():
        yield ".".join((*path, str(name)))
        if isinstance(value, CfgNode):
            yield from _flatten(value, (*path, str(name)))


def write_stock_config(cfg, path):
    """Writes `cfg` without our keys as a YAML file that Detectron2's own `get_cfg` can merge."""
    stock = get_cfg()
    if isinstance(stock, AmpCfgNode):  # while `install` holds
        stock = _without_ours(stock, {}, ())
    with PathManager.open(path, "w") as file:
        file.write(CfgNode(_without_ours(cfg, stock, ())).dump())


def _without_ours(node, stock, path):
    """`node` as a dict, less the keys of DEFAULTS that `stock` does not have. Keys of other projects stay."""
    kept = {}
    for name, value in node.items():
        key = ".".join((*path, name))
        known = name in stock
        if isinstance(value, CfgNode):
            inner = _without_ours(value, stock[name] if known else {}, (*path, name))
            if inner or known:
                kept[name] = inner
        elif known or key not in DEFAULTS:
            kept[name] = value
    return kept
