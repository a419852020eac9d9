"""Writes a sample data set once, as COCO JSON and PNG, and registers COCO sets with Detectron2 lazily.

A set is one folder:

    d2amp_NAME/
      d2amp.json                the mark of a finished set: its version and the number of images a split
      annotations/SPLIT.json    COCO instances, categories numbered from 1
      SPLIT/*.png

It is made in a temporary folder beside it and renamed, so it is either whole or not there.
"""

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError

_MARK = "d2amp.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """One object of a picture.

    Attributes:
        category: index into the set's class names, from 0.
        polygons: outlines in pixels, each x0, y0, x1, y1, ...; pixel (0, 0) covers [0, 1) x [0, 1).
    """

    category: int
    polygons: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Picture:
    """One image with its objects. `image` is uint8, (H, W) or (H, W, 3) RGB; `file_name` ends in .png."""

    file_name: str
    image: np.ndarray
    instances: Sequence[Instance]


def dataset_root(root: str | os.PathLike | None = None) -> Path:
    """The folder that holds data sets: `root`, else $DETECTRON2_DATASETS, else "datasets", as in Detectron2."""
    return Path(root or os.environ.get("DETECTRON2_DATASETS") or "datasets").expanduser().absolute()


def split_paths(folder: Path, split: str) -> tuple[str, str]:
    """The annotation file and the image folder of one split."""
    return str(folder / "annotations" / f"{split}.json"), str(folder / split)


def is_complete(folder: Path, version: int) -> bool:
    """Whether `folder` holds a finished set of this version with no file lost since. Reads no image."""
    try:
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
        if mark["version"] != version:
            return False
        return all(
            os.path.isfile(json_file) and sum(name.endswith(".png") for name in os.listdir(images)) == count
            for (json_file, images), count in ((split_paths(folder, split), n) for split, n in mark["images"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_once(
    folder: Path,
    version: int,
    thing_classes: Sequence[str],
    make: Callable[[], Mapping[str, Iterable[Picture]]],
) -> Path:
    """Make sure that `folder` holds the set, making it when it is missing, damaged or of another version.

    Safe to call from several processes at once: one writes and the others wait for it. What a killed process left
    behind is removed. A folder of that name that this function did not write is set aside, not deleted.

    Args:
        folder: where the set belongs.
        version: number of the content; a set of another number is made anew.
        thing_classes: class names.
        make: returns the pictures of every split, called only when there is something to write.

    Returns:
        `folder`.

    Raises:
        UserError: the folder cannot be written. What `make` raises is passed on, and nothing is left behind.
    """
    if is_complete(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder) as locked:
            if is_complete(folder, version):
                return folder
            if locked:  # nobody else writes now: these belong to processes that were killed
                for left_over in folder.parent.glob(f".{folder.name}.tmp-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
            temporary = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex}"
            temporary.mkdir()  # not mkdtemp, whose folders are private: a set may be shared
            try:
                _write(temporary, version, thing_classes, make())
                _replace(temporary, folder, version)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write the data set {folder}: {error}. Set the environment variable DETECTRON2_DATASETS to a "
            "folder that can be written and has room."
        ) from error
    return folder


def register_coco(
    name: str,
    json_file: str,
    image_root: str,
    categories: Mapping[int, str],
    prepare: Callable[[], object] | None = None,
    **metadata,
) -> None:
    """Register a COCO set whose files are read, or made, on first use.

    The metadata are complete at once: class names, category ids, `evaluator_type` "coco", and the two paths.
    Where the name is registered with the same paths nothing changes; another set of that name is replaced: whether that
    is wanted is the caller's question.

    Args:
        name: the name in `DATASETS.TRAIN` or `DATASETS.TEST`.
        json_file, image_root: annotation file and image folder.
        categories: COCO category id -> class name, in the order of the contiguous class indices.
        prepare: called before the files are read.
        metadata: further metadata.
    """
    from detectron2.data import DatasetCatalog, MetadataCatalog

    known = MetadataCatalog.get(name) if name in DatasetCatalog else None
    if known is not None and (known.get("json_file"), known.get("image_root")) == (json_file, image_root):
        return
    replace_metadata(
        name,
        thing_classes=list(categories.values()),
        thing_dataset_id_to_contiguous_id={category: i for i, category in enumerate(categories)},
        evaluator_type="coco",
        json_file=json_file,
        image_root=image_root,
        **metadata,
    )
    DatasetCatalog.register(name, partial(_load, name, json_file, image_root, prepare))


def replace_metadata(name: str, **metadata) -> None:
    """Forget a data set's loader and metadata, and set its metadata to these."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    for catalog in (DatasetCatalog, MetadataCatalog):
        catalog.pop(name, None)
    MetadataCatalog.get(name).set(**metadata)


def _load(name: str, json_file: str, image_root: str, prepare: Callable[[], object] | None) -> list[dict]:
    from detectron2.data.datasets import load_coco_json

    if prepare is not None:
        prepare()
    return load_coco_json(json_file, image_root, name)


@contextlib.contextmanager
def _lock(folder: Path):
    """Hold the lock of `folder`; yields False where the file system has no locks, and renaming alone must do."""
    import portalocker
    from iopath.common.file_io import file_lock

    lock = file_lock(str(folder.parent / f".{folder.name}"))
    try:
        lock.acquire()
    except portalocker.exceptions.AlreadyLocked as error:
        raise UserError(
            f"another process has been writing {folder} for an hour. End it, or delete {lock.filename}, and try again."
        ) from error
    except portalocker.exceptions.LockException as error:
        logger.warning(f"{folder.parent} cannot be locked ({error}); writing without a lock.")
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _replace(temporary: Path, folder: Path, version: int) -> None:
    if folder.exists():
        if (folder / _MARK).exists():
            shutil.rmtree(folder)
        else:
            aside = folder.with_name(f"{folder.name}.old-{uuid.uuid4().hex[:8]}")
            os.replace(folder, aside)
            logger.warning(f"{folder} was not a data set written by d2amp; it is kept as {aside}.")
    try:
        os.replace(temporary, folder)
    except OSError:
        if not is_complete(folder, version):  # else a process that had no lock was faster
            raise


def _write(folder: Path, version: int, thing_classes: Sequence[str], splits: Mapping[str, Iterable[Picture]]) -> None:
    counts = {}
    (folder / "annotations").mkdir()
    for split, pictures in splits.items():
        json_file, image_root = split_paths(folder, split)
        os.mkdir(image_root)
        images, annotations = [], []
        for picture in pictures:
            height, width = picture.image.shape[:2]
            Image.fromarray(picture.image).save(os.path.join(image_root, picture.file_name), compress_level=1)
            images.append({"id": len(images) + 1, "file_name": picture.file_name, "height": height, "width": width})
            for instance in picture.instances:
                annotation = {"id": len(annotations) + 1, "image_id": len(images), "iscrowd": 0}
                annotations.append({**annotation, **_shape(instance, height, width)})
        categories = [{"id": i + 1, "name": name} for i, name in enumerate(thing_classes)]
        content = {"info": {"version": str(version)}, "images": images, "categories": categories}
        Path(json_file).write_text(json.dumps({**content, "annotations": annotations}), encoding="utf-8")
        counts[split] = len(images)
    (folder / _MARK).write_text(json.dumps({"version": version, "images": counts}), encoding="utf-8")


def _shape(instance: Instance, height: int, width: int) -> dict:
    """The geometry of a COCO annotation: the box of the outlines, and the area that pycocotools fills for them."""
    import pycocotools.mask

    polygons = [[round(float(value), 2) for value in polygon] for polygon in instance.polygons]
    points = np.concatenate([np.reshape(polygon, (-1, 2)) for polygon in polygons])
    (x0, y0), (x1, y1) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height, f"object outside the image: {x0, y0, x1, y1}"
    filled = pycocotools.mask.merge(pycocotools.mask.frPyObjects(polygons, height, width))
    return {
        "category_id": instance.category + 1,
        "bbox": [x0, y0, round(x1 - x0, 2), round(y1 - y0, 2)],
        "area": int(pycocotools.mask.area(filled)),
        "segmentation": polygons,
    }
