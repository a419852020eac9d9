"""The shortest list of modules in fp32 that brings the errors under their limits, found by trying."""

import dataclasses
import logging
import math
import statistics
from dataclasses import dataclass
from typing import Optional, Tuple

from .measure import Measurement

logger = logging.getLogger(__name__)

MOST = 6  # modules: a longer list is no remedy
TRIALS = 16
OUTLIER = 4  # times what a module usually adds: less is what rounding does everywhere, and no module is to blame
HELPS = 0.9  # of the worst error is left, or less


@dataclass
class Proposal:
    """What was tried.

    Attributes:
        measurement (Measurement or None): of the policy that brings every error under its limit; None: nothing did.
        best (Measurement): of all that were measured.
        modules (tuple[str]): in fp32 beside those of the config.
        shield (bool): whether the shield has to be turned on.
        trials (int): how many policies were measured.
    """

    measurement: Optional[Measurement]
    best: Measurement
    modules: Tuple[str, ...]
    shield: bool
    trials: int


def propose(auditor, first):
    """Tries the shield, where it is off; then modules that add far more than others, in the order of what they add; then
    whole parts of the model.

    After each module the others are ranked anew. A module that does not help is left out, and so is, in the end, one
    without which it works.

    Args:
        auditor (Auditor):
        first (Measurement): of the audited policy, with an error above its limit.

    Returns:
        Proposal
    """
    search = _Search(auditor, first)
    if not first.policy.shield:
        trial = search.measure((), shield=True)
        if trial.excess <= 1 or trial.excess < first.excess:
            search.current, search.shield = trial, True
    chosen = search.add([], lambda chosen, refused: _outlier(auditor, search.current.policy, chosen, refused))
    if search.current.excess > 1:
        parts = _parts(auditor)
        chosen = search.add(chosen, lambda chosen, refused: _part(parts, chosen, refused))
    if search.current.excess <= 1:
        chosen = search.without_needless(chosen)
    works = search.current.excess <= 1
    return Proposal(
        search.current if works else None,
        search.current if works else min([first, *search.all], key=lambda measured: measured.excess),
        tuple(chosen),
        search.shield and not first.policy.shield,
        len(search.all),
    )


class _Search:
    def __init__(self, auditor, first):
        self._auditor, self._policy = auditor, first.policy
        self.current, self.shield = first, first.policy.shield
        self.all = []

    def measure(self, modules, shield):
        patterns = (*self._policy.fp32_modules, *modules)
        measured = self._auditor.measure(dataclasses.replace(self._policy, fp32_modules=patterns, shield=shield))
        self.all.append(measured)
        what = ", ".join(modules) or "the shield"
        logger.info(f"Tried {what} in fp32: the worst error is {measured.excess:.3g} times its limit.")
        return measured

    def add(self, chosen, choose):
        """Adds modules as long as that helps.

        Args:
            chosen (list[str]): so far.
            choose (callable): of (chosen, refused), gives (name, whether its output was not finite) or None.

        Returns:
            list[str]: with those that were added.
        """
        refused = set()
        while self.current.excess > 1 and len(chosen) < MOST and len(self.all) < TRIALS:
            candidate = choose(chosen, refused)
            if candidate is None:
                break
            name, is_broken = candidate
            modules = [other for other in chosen if not other.startswith(f"{name}.")]
            trial = self.measure((*modules, name), self.shield)
            if is_broken or trial.excess < HELPS * self.current.excess:
                chosen, self.current = [*modules, name], trial
            else:
                refused.add(name)
        return chosen

    def without_needless(self, chosen):
        """What is left of a list that works when each module without which it works, too, is left out."""
        for name in chosen[:-1]:
            fewer = [other for other in chosen if other != name]
            if len(self.all) < TRIALS and (trial := self.measure(fewer, self.shield)).excess <= 1:
                chosen, self.current = fewer, trial
        return chosen


def _outlier(auditor, policy, chosen, refused):
    """The module that adds most, if that is far more than what others add."""
    added = [*auditor.ranking(policy, True), *auditor.ranking(policy, False)]
    usual = statistics.median([one.error for one in added if 0 < one.error < math.inf] or [0.0])
    for one in sorted(added, key=lambda one: -one.error):
        if one.error <= OUTLIER * usual:
            return None
        # The model itself cannot stay in fp32, but what its own code computes with can come from modules that do.
        feeding = [other for other in added if not one.name and other.caller == "" and other.mode == one.mode]
        for other in [one, *sorted(feeding, key=lambda other: -other.order)]:
            if other.name and not _is_inside(other.name, chosen) and other.name not in refused:
                return other.name, other is one and math.isinf(one.error)
    return None


def _parts(auditor):
    """The parts of the model with parameters, the last first: heads are small, and close to the losses."""
    return [name for name, part in auditor.reference.named_children() if any(True for _ in part.parameters())][::-1]


def _part(parts, chosen, refused):
    name = next((name for name in parts if name not in refused and not _is_inside(name, chosen)), None)
    return name and (name, False)


def _is_inside(name, chosen):
    return any(name == other or name.startswith(f"{other}.") for other in chosen)
