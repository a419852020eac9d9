"""Predictions on a few images of every evaluation, in TensorBoard's Images tab."""

import logging
import weakref

import numpy as np
import torch
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.engine import HookBase
from PIL import Image

from .. import random_state
from .stages import unwrap

logger = logging.getLogger(__name__)

IMAGES = 4  # of each evaluation
CONFIDENCE = 0.5
MOST, FEWEST = 50, 3  # instances that are drawn; the fewest are there even when none is confident
LONGEST_SIDE = 800  # pixels


class PredictionImages(HookBase):
    """Draws what the model returns for the first images of an evaluation, as it returns it: nothing is predicted twice.

    Goes behind the hook that evaluates and in front of the one that closes the writers.
    """

    late = True

    def __init__(self, board, model, metadata=None, image_format="BGR"):
        """
        Args:
            board (Board):
            model (nn.Module): as Detectron2's: a list of dicts in, a list of dicts out.
            metadata (Metadata or None): of the data set, for the names of classes.
            image_format (str): of the model's input, as INPUT.FORMAT.
        """
        self._board = board
        self._model = unwrap(model)
        self._metadata = metadata
        self._format = image_format
        self._left = IMAGES
        self._handle = None

    def before_train(self):
        self._left = IMAGES
        me = weakref.ref(self)  # a copy of the model, such as an average of weights, must not copy this hook

        def watch(model, inputs, outputs):
            hook = me()
            if hook is not None and hook._left and not model.training:
                hook._watch(inputs, outputs)

        self._handle = self._model.register_forward_hook(watch)

    def before_step(self):
        self._left = IMAGES  # what comes next is another evaluation

    def after_train(self):
        if self._handle is not None:
            self._handle.remove()

    def _watch(self, inputs, outputs):
        summary = self._board.summary
        if summary is None or not inputs or not _is_batch(inputs[0]) or not _is_batch(outputs):
            return
        for sample, prediction in list(zip(inputs[0], outputs))[: self._left]:
            state = random_state.capture()  # Detectron2 draws colours from numpy's generator
            np.random.seed(0)
            try:
                image = render(sample, prediction, self._metadata, self._format)
                summary.add_image(f"predictions/{IMAGES - self._left}", image, self.trainer.storage.iter, dataformats="HWC")
            except Exception as error:  # a picture is not worth an evaluation
                logger.warning(f"No more pictures of predictions in TensorBoard: {type(error).__name__}: {error}")
                self._handle.remove()
                self._left = 0
                return
            finally:
                random_state.restore(state)
            self._left -= 1


def _is_batch(value):
    return isinstance(value, (list, tuple)) and all(isinstance(item, dict) for item in value)


@torch.no_grad()
def render(sample, prediction, metadata=None, image_format="BGR"):
    """Draws the predictions of one image.

    Args:
        sample (dict): with "image", a Tensor (C, H, W) as the model takes it, and maybe "height" and "width" of the
            predictions.
        prediction (dict): "instances", "sem_seg" or "panoptic_seg", on any device, in any precision.
        metadata, image_format: as for PredictionImages.

    Returns:
        np.ndarray: (H, W, 3), RGB, uint8, its longest side not above LONGEST_SIDE.
    """
    from ..predictions import at_confidence, draw  # imports OpenCV, which takes a second

    size = sample.get("height", sample["image"].shape[1]), sample.get("width", sample["image"].shape[2])
    pixels = torch.nn.functional.interpolate(sample["image"][None].float().cpu(), size=size, mode="bilinear")
    rgb = convert_image_to_rgb(pixels[0].clamp(0, 255).permute(1, 2, 0).to(torch.uint8), image_format)
    if "instances" in prediction:
        prediction = {**prediction, "instances": best(prediction["instances"])}
    else:
        prediction = at_confidence(prediction, 0)  # says what cannot be drawn
    drawn = Image.fromarray(draw(np.asarray(rgb)[:, :, ::-1], prediction, metadata))
    drawn.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return np.asarray(drawn)


def best(instances):
    """The confident instances, at most MOST; the FEWEST best ones when none is confident. On the host, in fp32."""
    order = instances.scores.float().argsort(descending=True, stable=True)
    confident = int((instances.scores >= CONFIDENCE).sum())
    chosen = instances[order[: min(confident, MOST) or FEWEST]].to("cpu")
    for name, field in chosen.get_fields().items():
        if isinstance(field, torch.Tensor) and field.dtype in (torch.float16, torch.bfloat16):
            chosen.set(name, field.float())
    return chosen
