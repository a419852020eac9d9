"""SOLVER.AMP.FP32_MODULES: modules of a model that stay in fp32, by patterns."""

import difflib
import fnmatch

from ..errors import UserError
from .island import clean_name, island_class, stock_class, unwrapped


def keep_in_fp32(model, patterns):
    """Makes every module that a pattern matches an fp32 island, in place. Doing it twice changes nothing.

    Args:
        model (nn.Module): in DistributedDataParallel or not.
        patterns (sequence[str]): glob patterns, compared with qualified names ("roi_heads.box_predictor") and with
            class names ("MSDeformAttn"). `*` also matches dots.

    Returns:
        dict[str, list[str]]: pattern -> qualified names of the modules that it matched.

    Raises:
        UserError: for a pattern that matches nothing, with the nearest names.
    """
    modules = {clean_name(name): module for name, module in unwrapped(model).named_modules() if name}
    matched = {}
    for pattern in patterns:
        matched[pattern] = [
            name
            for name, module in modules.items()
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(stock_class(module).__name__, pattern)
        ]
        if not matched[pattern]:
            raise UserError(_no_match(pattern, modules))
    for name in dict.fromkeys(name for names in matched.values() for name in names):
        module = modules[name]
        if getattr(type(module), "is_island", False):
            continue
        module.__class__ = island_class(type(module))
    return matched


def _no_match(pattern, modules):
    names = [*modules, *sorted({stock_class(module).__name__ for module in modules.values()})]
    plain = pattern.strip("*.?") or pattern
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.5)
    near = near or [name for name in names if plain.lower() in name.lower()][:3]
    hint = f" Near: {', '.join(near)}." if near else f" The model's parts: {', '.join(n for n in names if '.' not in n)[:300]}."
    return (
        f"SOLVER.AMP.FP32_MODULES (train.amp.fp32_modules) has {pattern!r}, which matches no module, neither by its "
        f"qualified name nor by its class.{hint}"
    )
