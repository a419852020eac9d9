"""Histograms of log2 |gradient| per stage, and a picture of them with the limits of fp16 and bf16."""

import math

import numpy as np
from detectron2.engine import HookBase
from PIL import Image, ImageDraw, ImageFont

from .gradients import BIAS, OCTAVES

EVERY = 50  # readings between two pictures, after those at 1, 2, 4, 8 ...
LEFT, RIGHT = -136, 132  # octaves that the picture shows: all of bf16
WIDTH, HEIGHT, HEAD, SIDE = 2, 60, 56, 110  # pixels: of an octave, of a stage, above them, beside them
FP16, BF16 = (200, 30, 30), (30, 60, 200)


class GradientHistograms(HookBase):
    """Writes what GradientScalars counted. Goes behind WriteReadout."""

    def __init__(self, readout, gradients, board):
        """
        Args:
            readout (Readout):
            gradients (GradientScalars): whose octaves are written.
            board (Board):
        """
        self._readout = readout
        self._gradients = gradients
        self._board = board
        self._readings = 0

    def after_step(self):
        octaves = self._gradients.octaves
        if not self._readout.is_due(self.trainer) or not octaves or self._board.summary is None:
            return
        iteration = self.trainer.iter
        for stage, counts in octaves.items():
            data = histogram(counts)
            if data is not None:
                self._board.summary.add_histogram_raw(f"gradients_log2/{stage}", **data, global_step=iteration)
        self._readings += 1
        if self._readings & (self._readings - 1) == 0 or self._readings % EVERY == 0:
            image = picture(octaves, self._gradients.scale)
            self._board.summary.add_image("gradients_log2/limits", image, iteration, dataformats="HWC")


def histogram(counts):
    """The arguments of `SummaryWriter.add_histogram_raw` for counts by octave, or None when there is nothing to show.

    Values that are 0 or not finite have no place on the axis.
    """
    present = [octave for octave in range(1, OCTAVES - 1) if counts[octave]]
    if not present:
        return None
    octaves = range(present[0], present[-1] + 1)
    middles = [octave - BIAS + 0.5 for octave in octaves]
    shown = [float(counts[octave]) for octave in octaves]
    return {
        "min": float(present[0] - BIAS),
        "max": float(present[-1] - BIAS + 1),
        "num": sum(shown),
        "sum": sum(m * n for m, n in zip(middles, shown)),
        "sum_squares": sum(m * m * n for m, n in zip(middles, shown)),
        "bucket_limits": [float(octave - BIAS + 1) for octave in octaves],
        "bucket_counts": shown,
    }


def limits(scale):
    """Where the ranges of fp16 and bf16 end on the axis of unscaled gradients: [(log2, text, colour)].

    Args:
        scale (float): by which fp16 multiplies gradients; bf16 needs none.
    """
    shift = math.log2(scale)
    return [
        (-25 - shift, "fp16: rounded to 0 below", FP16),
        (-14 - shift, "fp16: fewer bits below", FP16),
        (16 - shift, "fp16: infinite above", FP16),
        (-126, "bf16: fewer bits below", BF16),
        (128, "bf16: infinite above", BF16),
    ]


def picture(octaves, scale):
    """The histograms of all stages, one below the other, on one axis with lines at the limits.

    Args:
        octaves (dict[str, list[float]]): OCTAVES counts for each stage.
        scale (float): of the gradients in fp16.

    Returns:
        np.ndarray: (H, W, 3), RGB, uint8.
    """
    width, bottom = SIDE + (RIGHT - LEFT) * WIDTH + 8, HEAD + HEIGHT * len(octaves)
    image = Image.new("RGB", (width, bottom + 34), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()
    for row, (stage, counts) in enumerate(octaves.items()):
        base = HEAD + HEIGHT * (row + 1) - 4
        most = max(counts[1:-1]) or 1
        for octave in range(1, OCTAVES - 1):
            if counts[octave]:
                left = _x(octave - BIAS)
                top = base - max(round((HEIGHT - 10) * counts[octave] / most), 1)
                draw.rectangle([left, top, left + WIDTH - 1, base], fill=(120, 120, 120))
        draw.line([(SIDE, base + 1), (width - 8, base + 1)], fill=(200, 200, 200))
        values = sum(counts) or 1
        draw.text((4, base - 44), stage[:17], fill="black", font=font)
        draw.text((4, base - 30), f"zero {100 * counts[0] / values:.3g} %", fill=(90, 90, 90), font=font)
        if counts[-1]:
            draw.text((4, base - 16), f"not finite {counts[-1]:g}", fill=FP16, font=font)
    for row, (place, text, colour) in enumerate(limits(scale)):
        x, y = min(max(_x(place), SIDE), width - 8), 4 + 10 * row
        draw.line([(x, y), (x, bottom)], fill=colour, width=2)
        end = x + 3 + draw.textlength(text, font=font)
        draw.text((x + 3 if end < width else x - 3 - draw.textlength(text, font=font), y), text, fill=colour, font=font)
    for tick in range(-120, RIGHT, 20):
        draw.text((_x(tick) - 8, bottom + 4), str(tick), fill="black", font=font)
    title = f"values by log2 |gradient|, unscaled; fp16 at gradient scale {scale:g}"
    draw.text((SIDE, bottom + 19), title, fill="black", font=font)
    return np.asarray(image)


def _x(log2):
    return round(SIDE + (log2 - LEFT) * WIDTH)
