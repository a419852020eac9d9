"""What an error may be. All limits follow from one tolerance."""

import math
from dataclasses import dataclass

TOLERANCE = 0.02

# What is compared -> how many tolerances it may differ.
FACTORS = {
    "loss": 1,  # relative error of each loss
    "gradient": 10,  # relative error of the gradient of a stage
    "box": 1,  # 1 - median IoU of matched boxes
    "score": 1,  # median distance of matched scores
    "detections": 5,  # share of detections gained and lost
    "pixels": 1,  # share of pixels of another class
    "ap": 50,  # points of AP, mIoU or PQ
}
NOISE = 3  # times what rounding noise in the weights does to a gradient, it may differ in any case


@dataclass(frozen=True)
class Figure:
    """One error and its limit.

    Attributes:
        kind (str): a name in FACTORS.
        name (str): of the loss, the stage, or what it is.
        value (float): infinite where there was nothing finite.
        limit (float):
    """

    kind: str
    name: str
    value: float
    limit: float

    @property
    def excess(self):
        """By how much the value exceeds its limit, as a factor: up to 1 is fine."""
        return self.value / self.limit if math.isfinite(self.value) else math.inf


def figures_of(losses, gradients, noise, detections, tolerance):
    """All errors of one measurement with their limits.

    Args:
        losses, gradients (dict[str, float]): relative errors.
        noise (dict[str, float]): relative errors of gradients that come from rounding noise.
        detections (Detections or None):
        tolerance (float): above 0.

    Returns:
        list[Figure]
    """
    limits = {kind: factor * tolerance for kind, factor in FACTORS.items()}
    figures = [Figure("loss", name, value, limits["loss"]) for name, value in losses.items()]
    for stage, value in gradients.items():
        allowance = NOISE * noise.get(stage, 0.0)
        limit = max(limits["gradient"], allowance if math.isfinite(allowance) else 0.0)
        figures.append(Figure("gradient", stage, value, limit))
    if detections is not None and detections.images:
        found = {"box": ("1 - IoU of matched boxes", 1 - detections.iou), "score": ("score shift", detections.score_shift),
                 "detections": ("gained or lost", detections.share_changed)}  # fmt: skip
        if detections.pixels_changed is not None:
            found["pixels"] = ("pixels of another class", detections.pixels_changed)
        if detections.unusable:
            found["detections"] = ("images without finite predictions", math.inf)
        figures += [Figure(kind, name, value, limits[kind]) for kind, (name, value) in found.items()]
    return figures


def ap_figures(found, wanted, tolerance):
    """The difference of the headline result of each task, in points.

    Args:
        found, wanted (dict[str, float]): results by flat name, such as "bbox/AP", as `evaluate` gives them.
        tolerance (float):
    """
    heads = [name for name in wanted if name.rpartition("/")[2] in ("AP", "mIoU", "PQ", "PQ_all", "IoU")]
    figures = []
    for name in heads:
        if math.isfinite(wanted[name]):  # a set without objects of a kind has no AP
            value = abs(found.get(name, math.nan) - wanted[name])
            figures.append(Figure("ap", name, math.inf if math.isnan(value) else value, FACTORS["ap"] * tolerance))
    return figures


def worst(figures):
    """By how much the worst figure exceeds its limit: up to 1 is fine."""
    return max((figure.excess for figure in figures), default=0.0)
