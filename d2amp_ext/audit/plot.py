"""The picture of an audit: every error over its limit, and the modules that add most."""

import math

MODULES = 15
PER_PANEL = 0.28  # inches a bar
ABOVE, BELOW = "#c0392b", "#2e86ab"


def plot(report, path):
    """Draws a Report as a PNG.

    Args:
        report (Report):
        path (str): in a folder that exists.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = [*report.measurement.figures, *report.result_figures]
    added = [("training", one) for one in report.training] + [("evaluation", one) for one in report.evaluation]
    added = sorted((pair for pair in added if pair[1].error > 0), key=lambda pair: -pair[1].error)[:MODULES]
    rows = max(len(figures), len(added), 4)
    figure = Figure(figsize=(15, 1.6 + PER_PANEL * rows))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _bars(
        left,
        [f"{one.kind}: {one.name}" for one in figures],
        [one.excess for one in figures],
        "error as a share of its limit",
    )
    left.axvline(1, color="black", linewidth=1, linestyle="--")
    _bars(
        right,
        [f"{one.label} ({mode})" for mode, one in added],
        [one.error for _, one in added],
        "relative error that a module adds",
        color=BELOW,
    )
    figure.suptitle(f"fp32 against {report.measurement.policy.precision}: {report.origin['config']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _bars(axes, labels, values, title, color=None):
    """Horizontal bars on a logarithmic axis, the first at the top; what is not finite goes to its end."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(finite, default=0.1) / 2, max([*finite, 1e-6]) * 2
    if any(not math.isfinite(value) for value in values):
        high *= 100
    lengths = [high if not math.isfinite(value) else max(value, low) for value in values]
    colors = [color or (ABOVE if value > 1 else BELOW) for value in values]
    colors = [color if math.isfinite(value) else ABOVE for color, value in zip(colors, values)]
    axes.barh(range(len(values)), lengths, color=colors)
    for place, value in enumerate(values):
        if not math.isfinite(value):
            axes.text(high, place, "not finite ", ha="right", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
