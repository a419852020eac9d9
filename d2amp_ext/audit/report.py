"""What an audit found: a table for people, a dict for JSON, and the lines of config that mend it."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .measure import Measurement
from .modules import Added
from .propose import Proposal

SHOWN = 10  # modules in a table
KEPT = 100  # modules in the JSON


@dataclass
class Report:
    """All that an audit found.

    Attributes:
        origin (dict): config, weights, device, tolerance, batches: what was compared.
        lazy (bool): whether the config is a LazyConfig.
        measurement (Measurement): of the audited policy.
        training, evaluation (list[Added]): modules by the error that they add, the largest first.
        results (dict): data set/task/metric -> (in fp32, in the precision); {} when AP was left out.
        result_figures (list[Figure]): differences of AP and the like, with their limits.
        proposal (Proposal or None): None when nothing exceeds its limit, or nothing was tried.
    """

    origin: Dict[str, object]
    lazy: bool
    measurement: Measurement
    training: List[Added]
    evaluation: List[Added]
    results: Dict[str, tuple] = field(default_factory=dict)
    result_figures: List[object] = field(default_factory=list)
    proposal: Optional[Proposal] = None

    @property
    def exceeding(self):
        """The figures above their limits, the worst first."""
        figures = [*self.measurement.figures, *self.result_figures]
        return sorted((figure for figure in figures if figure.excess > 1), key=lambda figure: -figure.excess)

    @property
    def snippet(self):
        """The lines of config that were tried and bring every error under its limit, or ""."""
        if self.proposal is None or self.proposal.measurement is None:
            return ""
        policy = self.proposal.measurement.policy
        modules, shield = list(policy.fp32_modules), self.proposal.shield
        if self.lazy:
            lines = ["train.amp.enabled = True", f'train.amp.precision = "{policy.precision}"']
            lines += ["train.amp.shield = True"] * shield + [f"train.amp.fp32_modules = {_quoted(modules)}"] * bool(modules)
            return "\n".join(lines)
        lines = ["SOLVER:", "  AMP:", "    ENABLED: True", f'    PRECISION: "{policy.precision}"']
        lines += ["    SHIELD: True"] * shield + [f"    FP32_MODULES: {_quoted(modules)}"] * bool(modules)
        return "\n".join(lines)

    def as_dict(self):
        """Plain types only; numbers that are not finite are strings."""
        measured = self.measurement
        proposal = self.proposal
        return _plain({
            "format": "d2amp_ext.audit.1",
            **self.origin,
            "precision": measured.policy.precision,
            "policy": measured.policy.describe(),
            "fine": not self.exceeding,
            "exceeding": [_figure(figure) for figure in self.exceeding],
            "figures": [_figure(figure) for figure in [*measured.figures, *self.result_figures]],
            **_measured(measured),
            "modules": {"training": _modules(self.training), "evaluation": _modules(self.evaluation)},
            "results": {name: {"fp32": pair[0], "audited": pair[1]} for name, pair in self.results.items()},
            "proposal": proposal and {
                "works": proposal.measurement is not None,
                "config": self.snippet,
                "modules": list(proposal.modules),
                "shield": proposal.shield,
                "trials": proposal.trials,
                "measured": {**_measured(proposal.best), "figures": [_figure(f) for f in proposal.best.figures]},
            },
        })  # fmt: skip

    def describe(self):
        """The tables for people."""
        measured = self.measurement
        lines = [
            f"Audit of {self.origin['config']} with {self.origin['weights']}",
            f"fp32 against {measured.policy.describe()}",
            f"tolerance {self.origin['tolerance']:g}, training batches {self.origin['batches']}, images "
            f"{measured.detections.images if measured.detections else 0}",
        ]
        limits = {(figure.kind, figure.name): figure for figure in [*measured.figures, *self.result_figures]}
        rows = [[name, _number(low), _number(high), *_judged(limits["loss", name])]
                for name, (low, high, _) in measured.losses.items()]  # fmt: skip
        lines += _table("Losses", ["loss", "fp32", measured.policy.precision, "error", "limit", ""], rows)
        if measured.failure:
            lines.append(f"The forward pass in {measured.policy.precision} raised: {measured.failure}")
        rows = [[stage, _percent(noise), *_judged(limits["gradient", stage])]
                for stage, (_, noise) in measured.gradients.items()]  # fmt: skip
        title = "Gradients" + (f" (scale of the losses: {measured.scale:g})" if measured.scale != 1 else "")
        lines += _table(title, ["stage", "rounding noise", "error", "limit", ""], rows)
        for title, added in (("training", self.training), ("evaluation", self.evaluation)):
            rows = [[one.label, one.cls, _percent(one.error), one.dtype, _number(one.largest)] for one in added[:SHOWN]]
            if rows:
                lines += _table(f"Modules by the error that they add, in {title}",
                                ["module", "class", "adds", "output", "largest"], rows, texts=2)  # fmt: skip
        if measured.detections is not None:
            rows = [[figure.name, *_judged(figure)] for figure in measured.figures if figure.kind not in ("loss", "gradient")]
            found = measured.detections
            lines += _table(f"Predictions ({found.matched} matched detections, {found.gained} gained, {found.lost} lost)",
                            ["compared", "difference", "limit", ""], rows)  # fmt: skip
            lines.append(f"  IoU: mean {found.mean_iou:.4f}, worst {found.worst_iou:.4f}; score shift: mean "
                         f"{found.mean_score_shift:.4f}, worst {found.worst_score_shift:.4f}"
                         + (f"; mask IoU {found.mask_iou:.4f}" if found.mask_iou is not None else "")
                         + (f"; keypoints {found.keypoint_shift:.3f} px" if found.keypoint_shift is not None else ""))  # fmt: skip
            if not found.matched + found.gained + found.lost and found.pixels_changed is None:
                lines.append("  Neither run detected anything: predictions say nothing here. Are the weights trained?")
        rows = [[name, _number(low), _number(high), _difference(high - low), *self._verdict(limits, name)]
                for name, (low, high) in self.results.items()]  # fmt: skip
        if rows:
            lines += _table("Results", ["metric", "fp32", measured.policy.precision, "difference", "limit", ""], rows)
        return "\n".join([*lines, "", *self._conclusion()])

    @staticmethod
    def _verdict(limits, name):
        figure = limits.get(("ap", name))
        return _judged(figure)[1:] if figure else ["", ""]

    def _conclusion(self):
        if not self.exceeding:
            return ["Fine: nothing exceeds its limit."]
        worst = self.exceeding[0]
        lines = [f"{len(self.exceeding)} above the limit; the worst: {worst.name} ({worst.kind}), {_number(worst.excess)} times "
                 "its limit."]  # fmt: skip
        proposal = self.proposal
        if proposal is None:
            return lines
        if self.snippet:
            tried = f"Tried, and every loss, gradient and prediction is then under its limit ({proposal.trials} trials):"
            return [*lines, tried, "", *(f"  {line}" for line in self.snippet.splitlines())]
        best = ", ".join([*["SHIELD True"] * proposal.best.policy.shield, *proposal.best.policy.fp32_modules])
        return [*lines, f"No short list of FP32_MODULES mends it ({proposal.trials} trials; the best, {best or 'none'}, "
                f"leaves {_number(proposal.best.excess)} times the limit). The error is not that of a few modules: choose "
                "another precision, or a wider --tolerance."]  # fmt: skip


def _quoted(names):
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _judged(figure):
    show = _percent if figure.kind != "ap" else _number
    return [show(figure.value), show(figure.limit), "<-- above" if figure.excess > 1 else ""]


def _difference(value):
    return f"{value:+.3f}" if math.isfinite(value) else "-"


def _percent(value):
    return f"{100 * value:.3g} %" if math.isfinite(value) else "not finite"


def _number(value):
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _table(title, head, rows, texts=1):
    """Lines of text; the first columns are texts, the others numbers."""
    cells = [head, *rows]
    widths = [max(len(str(row[column])) for row in cells) for column in range(len(head))]
    lines = ["", title]
    for row in cells:
        padded = [str(cell).ljust(width) if number < texts else str(cell).rjust(width)
                  for number, (cell, width) in enumerate(zip(row, widths))]  # fmt: skip
        lines.append("  " + "  ".join(padded).rstrip())
    return lines


def _measured(measured):
    losses = {name: dict(zip(("fp32", "audited", "error"), values)) for name, values in measured.losses.items()}
    gradients = {stage: dict(zip(("error", "noise"), values)) for stage, values in measured.gradients.items()}
    detections = measured.detections and dataclasses.asdict(measured.detections)
    return {"losses": losses, "gradients": gradients, "detections": detections, "scale": measured.scale,
            "failure": measured.failure, "excess": measured.excess}  # fmt: skip


def _modules(added):
    return [{"module": one.label, "class": one.cls, "error": one.error, "dtype": one.dtype, "largest": one.largest,
             "calls": one.calls} for one in added[:KEPT]]  # fmt: skip


def _figure(figure):
    return {**dataclasses.asdict(figure), "excess": figure.excess}


def _plain(value):
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
