"""What the data sets of a cfg need before they are used: to be registered, and to fit the model."""

import contextlib
import difflib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ..errors import UserError
from . import coco_format, nuclei, readers, shapes
from .specs import Spec, parse_spec

_KEY = "DATASETS.REGISTER"
_SAMPLES = (nuclei, shapes)
_FOLDERS = ("image_root", "dirname", "image_dir", "gt_dir", "sem_seg_root", "panoptic_root")
_FILES = ("json_file", "panoptic_json")
# Which key holds the class count of a meta architecture whose name has this in it. Others are not judged.
_CLASS_COUNT_KEYS = {
    "RCNN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "PanopticFPN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "RetinaNet": "MODEL.RETINANET.NUM_CLASSES",
    "FCOS": "MODEL.RETINANET.NUM_CLASSES",
}
logger = logging.getLogger(__name__)
_thread = threading.local()


@contextlib.contextmanager
def _registering():
    """A context in which `register_named` does nothing in this thread: what asks for the set is its registration."""
    before, _thread.busy = getattr(_thread, "busy", False), True
    try:
        yield
    finally:
        _thread.busy = before


def register_datasets(cfg: CfgNode) -> None:
    """Register what `DATASETS.REGISTER` lists, and `d2amp_nuclei_*` and `d2amp_shapes_*` where the cfg names them.

    Class names and evaluator type are known afterwards; images are read when a set is loaded. Calling it again is fine.

    Args:
        cfg: a Detectron2 cfg; it may lack `DATASETS.REGISTER`.

    Raises:
        UserError: an entry is malformed, its files are missing or cannot be read, or its name is taken.
    """
    used = {*_tuple(cfg.DATASETS.TRAIN), *_tuple(cfg.DATASETS.TEST)}
    with _registering():
        for entry in _tuple(cfg.DATASETS.get("REGISTER", ())):
            try:
                _register(parse_spec(entry))
            except UserError as error:
                raise UserError(f"{_KEY} has {entry!r}: {error}") from error
        for sample in _SAMPLES:
            if used.intersection(sample.NAMES):
                sample.register()


def register_named(name: str, entries: tuple | list = ()) -> None:
    """Register one data set, if it is one of the samples or of `entries`, which are as in `DATASETS.REGISTER`."""
    if getattr(_thread, "busy", False):
        return
    with _registering():
        for sample in _SAMPLES:
            if name in sample.NAMES:
                sample.register()
        for spec in map(parse_spec, _tuple(entries)):
            if spec.name == name:
                _register(spec)


def registered_names() -> set[str]:
    """Which data sets this package has registered."""
    samples = {name for sample in _SAMPLES for name in sample.NAMES if name in DatasetCatalog}
    known = {name: MetadataCatalog.get(name) for name in list(MetadataCatalog.keys())}
    return samples | {name for name, metadata in known.items() if metadata.get("d2amp_spec") is not None}


def forget(names: set[str]) -> None:
    """Undo the registration of data sets of this package."""
    for name in names:
        for catalog in (DatasetCatalog, MetadataCatalog):
            catalog.pop(name, None)


def check_datasets(cfg: CfgNode, *, train: bool = True) -> None:
    """Check, before a model is built, that the cfg's data sets are there and have as many classes as the model.

    Call `register_datasets` first. The package's own samples are made when they are not there yet.

    Args:
        cfg: a Detectron2 cfg.
        train: whether `DATASETS.TRAIN` will be used; `DATASETS.TEST` always is.

    Raises:
        UserError: nothing to train on or to evaluate, a set that is not registered, a path that does not exist, a class
            count that disagrees with the model's, or annotations that PASCAL's evaluator cannot read.
    """
    needed, purpose, example = ("TRAIN", "train on", "train") if train else ("TEST", "evaluate", "val")
    if not cfg.DATASETS[needed]:
        raise UserError(
            f"DATASETS.{needed} is empty, so there is nothing to {purpose}. Name a data set, for example "
            f"DATASETS.{needed} \"('coco_2017_{example}',)\"."
        )
    sets = [(f"DATASETS.{key}", name) for key in ("TRAIN", "TEST")[not train :] for name in _tuple(cfg.DATASETS[key])]
    for key, name in sets:
        if name not in DatasetCatalog:
            raise UserError(_unregistered(key, name))
    for key, name in sets:
        for what, path in _missing_paths(name):
            raise UserError(f"{key} has {name!r}, but {what} {path} does not exist. {_where_from(name)}")
    _check_class_counts(cfg, sets)
    _check_class_names(sets)
    for key, name in sets:
        metadata = MetadataCatalog.get(name)
        first_image = metadata.get("d2amp_first_image")
        if first_image and not PathManager.isfile(first_image):
            raise UserError(
                f"{key} has {name!r}, whose annotations name the image {first_image}, but there is no such file. "
                f"Mend the IMAGE_DIR of its entry in {_KEY}: {metadata.d2amp_spec}."
            )
        if key == "DATASETS.TEST" and metadata.get("d2amp_evaluation_problem"):
            raise UserError(
                f"{key} has {name!r}, which PASCAL's evaluator cannot read: {metadata.d2amp_evaluation_problem}. "
                "Mend the annotations, or evaluate on a COCO version of the set."
            )
        for sample in _SAMPLES:
            if name in sample.NAMES:
                sample.prepare(Path(metadata.json_file).parents[2])


def _register(spec: Spec) -> None:
    if spec.name in DatasetCatalog:
        before = MetadataCatalog.get(spec.name).get("d2amp_spec")
        if before == spec:
            return
        taken = f"as {before}" if before else "by Detectron2 or other code"
        raise UserError(f"the name {spec.name!r} is registered already, {taken}. Choose another name.")
    if any(spec.name in sample.NAMES for sample in _SAMPLES):
        raise UserError(f"the name {spec.name!r} belongs to a sample data set of d2amp_ext. Choose another name.")
    if spec.kind == "coco":
        file = readers.read_coco(spec.path)
        if "://" not in spec.rest and not os.path.isdir(spec.rest):
            raise UserError(f"there is no image folder {spec.rest}. Check the path.")
        extra = {"d2amp_spec": spec, "d2amp_first_image": os.path.join(spec.rest, file.first_image)}
        coco_format.register_coco(spec.name, spec.path, spec.rest, file.categories, **extra)
        return
    folder = readers.read_voc(spec.path, spec.rest)
    coco_format.replace_metadata(
        spec.name,
        thing_classes=list(folder.thing_classes),
        evaluator_type="pascal_voc",
        dirname=folder.dirname,
        split=folder.split,
        year=folder.year,
        d2amp_spec=spec,
        d2amp_evaluation_problem=folder.evaluation_problem,
    )
    DatasetCatalog.register(spec.name, folder.load)


def _tuple(names: str | tuple | list) -> tuple:
    return (names,) if isinstance(names, str) else tuple(names)


def _unregistered(key: str, name: str) -> str:
    near = difflib.get_close_matches(name, list(DatasetCatalog.keys()), n=3)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"{key} has {name!r}, which is not a registered data set. {meant}A set of your own is registered by an entry "
        f'in {_KEY}: "{name}=coco:ANNOTATIONS.json:IMAGE_DIR" or "{name}=voc:DIR:SPLIT".'
    )


def _missing_paths(name: str) -> Iterator[tuple[str, str]]:
    """What a set reads through Detectron2's or our loaders, and is not there. Other code's loaders are not judged."""
    metadata = MetadataCatalog.get(name)
    ours = metadata.get("d2amp_spec") is not None
    if not (ours or _is_builtin(name)):
        return
    paths = [("the file", metadata.get(attribute)) for attribute in _FILES]
    paths += [("the folder", metadata.get(attribute)) for attribute in _FOLDERS]
    if metadata.get("dirname") and metadata.get("split"):
        paths.append(("the file", os.path.join(metadata.dirname, "ImageSets", "Main", f"{metadata.split}.txt")))
    for what, path in paths:
        if path and "://" not in str(path) and not os.path.exists(path):
            yield what, os.path.abspath(path)


def _is_builtin(name: str) -> bool:
    return (getattr(DatasetCatalog[name], "__module__", None) or "").startswith("detectron2.data.datasets")


def _where_from(name: str) -> str:
    spec = MetadataCatalog.get(name).get("d2amp_spec")
    if spec:
        return f"Mend its entry in {_KEY}: {spec}."
    root = os.environ.get("DETECTRON2_DATASETS")
    now = f"now {root}" if root else 'not set, which means the folder "datasets" of the working directory'
    return (
        "Detectron2's own data sets are expected below the folder in the environment variable DETECTRON2_DATASETS "
        f"({now}). Set it before starting, or put the files there."
    )


def _check_class_counts(cfg: CfgNode, sets: list[tuple[str, str]]) -> None:
    architecture = cfg.MODEL.META_ARCHITECTURE
    count_key = next((key for part, key in _CLASS_COUNT_KEYS.items() if part in architecture), None)
    if count_key is None:
        return
    if "FCOS" in architecture and "NUM_CLASSES" in cfg.MODEL.get("FCOS", {}):
        count_key = "MODEL.FCOS.NUM_CLASSES"
    model_count = cfg.MODEL[count_key.split(".")[1]].NUM_CLASSES
    for key, name in sets:
        classes = MetadataCatalog.get(name).get("thing_classes")
        if classes is None:
            continue
        if not classes:
            raise UserError(f"{key} has {name!r}, which has no class: its thing_classes is empty. Name its classes.")
        if len(classes) != model_count:
            listed = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            noun = "class" if len(classes) == 1 else "classes"
            raise UserError(
                f"{count_key} is {model_count}, but {name!r} of {key} has {len(classes)} {noun} ({listed}). "
                f"Set {count_key} {len(classes)}, or name another data set."
            )
    if model_count < 1:
        raise UserError(f"{count_key} is {model_count}, but a detector needs at least one class. Set it to 1 or more.")


def _check_class_names(sets: list[tuple[str, str]]) -> None:
    """Sets trained on together must have the same classes; a test set with others is scored by index: a warning."""
    known = [(key, name, MetadataCatalog.get(name).get("thing_classes")) for key, name in sets]
    known = [item for item in known if item[2] is not None]
    for key, name, classes in known[1:]:
        first_key, first_name, first_classes = known[0]
        if classes == first_classes:
            continue
        differ = (
            f"{name!r} of {key} has the classes {list(classes)}, but {first_name!r} of {first_key} has "
            f"{list(first_classes)}"
        )
        if key == "DATASETS.TRAIN":
            raise UserError(f"{differ}. Data sets to train on together need the same classes in the same order.")
        if first_key == "DATASETS.TRAIN":
            logger.warning(f"{differ}; class indices are taken to mean the same.")
