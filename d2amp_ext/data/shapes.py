"""A small synthetic set for quick configs and tests: rectangles, discs and triangles. Needs no network.

`d2amp_shapes_train` has 64 images and `d2amp_shapes_val` 16, RGB, 128 x 96 and 96 x 128 (width x height) in turn, with
boxes and polygon masks. The pixels come from NumPy generators of their own, so the set is the same everywhere, and
making it leaves no trace in anybody's random state.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from . import coco_format

NAMES = ("d2amp_shapes_train", "d2amp_shapes_val")
THING_CLASSES = ("rectangle", "disc", "triangle")
_SPLITS = {"train": 64, "val": 16}
_VERSION = 1  # of the content: a set on disk that has another one is made anew
_MARGIN = 2  # pixels kept between two objects and to the edge


def prepare(root: str | os.PathLike | None = None) -> Path:
    """Write the set under `root` unless it is there. Quick when done; safe from several processes at once.

    Args:
        root: the folder of data sets; None means $DETECTRON2_DATASETS, else "datasets".

    Returns:
        The set's folder, `root/d2amp_shapes`.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = coco_format.dataset_root(root) / "d2amp_shapes"
    return coco_format.write_once(
        folder, _VERSION, THING_CLASSES, lambda: {split: _pictures(split, n) for split, n in _SPLITS.items()}
    )


def register(root: str | os.PathLike | None = None) -> None:
    """Register both splits with Detectron2; the files are made when one is first loaded.

    Calling it again is fine; with another root it moves the registration there.
    """
    folder = coco_format.dataset_root(root) / "d2amp_shapes"
    categories = {i + 1: name for i, name in enumerate(THING_CLASSES)}
    for name, split in zip(NAMES, _SPLITS):
        coco_format.register_coco(
            name, *coco_format.split_paths(folder, split), categories, prepare=partial(prepare, folder.parent)
        )


def _pictures(split: str, count: int) -> Iterator[coco_format.Picture]:
    for i in range(count):
        generator = np.random.default_rng([list(_SPLITS).index(split), i])
        width, height = (128, 96) if i % 2 == 0 else (96, 128)
        yield _picture(f"{split}_{i:03d}.png", width, height, generator)


def _picture(file_name: str, width: int, height: int, generator: np.random.Generator) -> coco_format.Picture:
    """One to five objects that do not touch, of random class, size and colour, over a noisy grey ground."""
    ground = int(generator.integers(30, 110))
    image = Image.new("RGB", (width, height), (ground,) * 3)
    draw = ImageDraw.Draw(image)
    instances, taken = [], []
    for _ in range(int(generator.integers(1, 6))):
        box = _free_box(width, height, taken, generator)
        if box is None:
            break
        taken.append(box)
        category = int(generator.integers(len(THING_CLASSES)))
        outline = _outline(category, box, generator)
        # a pixel belongs to the object when its centre does, and Pillow's coordinates are those of centres
        draw.polygon([(x - 0.5, y - 0.5) for x, y in outline], fill=tuple(generator.integers(130, 256, 3).tolist()))
        instances.append(coco_format.Instance(category, [outline.ravel().tolist()]))
    pixels = np.asarray(image, dtype=np.float64) + generator.normal(0.0, 8.0, (height, width, 1))
    return coco_format.Picture(file_name, pixels.clip(0, 255).astype(np.uint8), instances)


def _free_box(width: int, height: int, taken: list[np.ndarray], generator: np.random.Generator) -> np.ndarray | None:
    """A random box x0, y0, x1, y1 clear of the others, or None when there was no room in 50 tries."""
    for _ in range(50):
        size = generator.integers(16, 45, 2)
        x0, y0 = generator.integers(_MARGIN, np.array([width, height]) - _MARGIN - size)
        box = np.array([x0, y0, x0 + size[0], y0 + size[1]])
        if all((box[:2] >= other[2:] + _MARGIN).any() or (other[:2] >= box[2:] + _MARGIN).any() for other in taken):
            return box
    return None


def _outline(category: int, box: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The corners, (N, 2) of x and y in pixels, of a shape that fills `box` (the disc: its largest circle)."""
    x0, y0, x1, y1 = box.astype(float)
    name = THING_CLASSES[category]
    if name == "rectangle":
        return np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])
    if name == "disc":
        radius = min(x1 - x0, y1 - y0) / 2
        angle = np.linspace(0, 2 * np.pi, 32, endpoint=False)
        return np.stack([x0 + radius + radius * np.cos(angle), y0 + radius + radius * np.sin(angle)], axis=1)
    apex = x0 + (x1 - x0) * generator.uniform(0.25, 0.75)
    return np.array([[x0, y1], [apex, y0], [x1, y1]])
