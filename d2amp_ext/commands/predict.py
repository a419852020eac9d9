"""`d2amp predict`: draw a model's predictions on images, and write them as JSON."""

import argparse
import glob
import itertools
import json
import logging
import os
import re
import sys
import tempfile
from pathlib import Path

from ..errors import UserError

EXAMPLES = """
IMAGE is a file, a folder (the images in it, not in its subfolders), or a pattern such as 'frames/**/*.jpg'. For each
image a picture NAME.png with what the model found is written to DIR, and for all of them DIR/predictions.json: a list
with image, category_id, category_name, bbox (x, y, width, height in pixels), score and, where the model has them,
segmentation (COCO's run-length encoding) and keypoints of every object.

KEY VALUE pairs override the config, as in d2amp train. They come after the images.

examples:
  with the model that a run of d2amp train (or d2amp demo) left in its output folder; its last checkpoint is used
    %(prog)s photo.jpg --config-file output/config.yaml --output predictions
  a folder of images, with other weights, only what the model is very sure of
    %(prog)s images/ --config-file cfg.yaml --weights model_final.pth --output predictions --confidence 0.9
  in bf16; with test-time augmentation; on the CPU
    %(prog)s images/ --config-file cfg.yaml --output predictions TEST.AMP.ENABLED True TEST.AMP.PRECISION bf16
    %(prog)s images/ --config-file cfg.yaml --output predictions TEST.AUG.ENABLED True
    %(prog)s images/ --config-file cfg.yaml --output predictions MODEL.DEVICE cpu

exit status: 0 done; 1 an image could not be read (it is named, the others are done) or the run failed; 2 a mistake in
the arguments or the config
"""

SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tga", ".tif",
            ".tiff", ".webp")  # fmt: skip
PANOPTIC_KEY = "MODEL.PANOPTIC_FPN.COMBINE.INSTANCES_CONFIDENCE_THRESH"

logger = logging.getLogger(__name__)


def add_arguments(parser):
    """The command line of `d2amp predict`."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s IMAGE [IMAGE ...] --config-file FILE --output DIR [options] [KEY VALUE ...]"
    parser.add_argument("images", nargs="+", metavar="IMAGE",
                        help="image files, folders and patterns; then config overrides as KEY VALUE")  # fmt: skip
    parser.add_argument("--config-file", required=True, metavar="FILE",
                        help="a path, such as config.yaml in the output folder of a run, a config of this package, or "
                        "a name in Detectron2's model zoo")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="DIR", help="where pictures and predictions.json go")
    parser.add_argument("--weights", metavar="FILE", help="the model's weights, a path or URL; default: the last "
                        "checkpoint beside the config.yaml of a run, else MODEL.WEIGHTS")  # fmt: skip
    parser.add_argument("--confidence", type=float, default=0.5, metavar="C",
                        help="leave out objects with a score below C, from 0 to 1 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a summary for programs, as JSON, on stdout")
    parser.add_argument("--trust", action="store_true", help="allow config files and weights that can run code")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE",
                        help="config overrides too, as in Detectron2's demo")  # fmt: skip
    # Images and overrides are both positional and may stand on either side of the flags.
    parser.parse_args = parser.parse_intermixed_args


def run(args):
    """Predicts all images. Returns the exit status."""
    from detectron2.utils.logger import setup_logger

    for handler in setup_logger(name="d2amp_ext").handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # stdout is for the result
    if not 0 <= args.confidence <= 1:
        raise UserError(f"--confidence {args.confidence}: must lie between 0 and 1.")
    arguments, overrides = split_overrides(args.images)
    images, skipped = find_images(arguments)
    for name, reason in skipped.items():
        logger.warning(f"{name} is skipped: {reason}")
    if not images:
        raise UserError(f"There is no image to predict: {', '.join(arguments) or 'none was named'}. Name image files, "
                        f"a folder that holds some, or a pattern. Suffixes: {' '.join(SUFFIXES)}")  # fmt: skip
    cfg = _load_cfg(args, [*overrides, *args.opts])
    _make_folder(args.output)
    return _predict_all(args, cfg, images, skipped)


def split_overrides(arguments):
    """Images, and the KEY VALUE pairs that follow them.

    Overrides start at the first argument that is written like a config key and names no file or folder.

    Args:
        arguments (list[str]):

    Returns:
        (list[str], list[str])
    """
    for number, text in enumerate(arguments):
        if _is_key(text) and not os.path.exists(text):
            return arguments[:number], arguments[number:]
    return arguments, []


def _is_key(text):
    from detectron2.config import get_cfg

    if not re.fullmatch(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)*", text) or text.lower().endswith(SUFFIXES):
        return False
    return "." in text or text in get_cfg()


def find_images(arguments):
    """The image files that files, folders and patterns name, each once.

    Args:
        arguments (list[str]):

    Returns:
        (list[Path], dict): the images, in the order of the arguments and sorted within each; and for each argument
        that names none the reason.
    """
    images, problems = {}, {}
    for text in arguments:
        path = Path(text).expanduser()
        try:
            if path.is_dir():
                found = sorted(entry for entry in path.iterdir() if _is_image(entry))
            elif path.exists():
                found = [path]
            else:
                found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
                found = [match for match in found if _is_image(match)]
        except OSError as error:
            problems[text] = str(error)
            continue
        if not found:
            problems[text] = "there is no image in this folder" if path.is_dir() else "there is no such image"
        for image in found:
            images.setdefault(os.path.realpath(image), image)
    return list(images.values()), problems


def _is_image(path):
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def output_paths(images, folder):
    """A path for the picture of each image: folder/NAME.png, distinct, and none of the images.

    Args:
        images (list[Path]):
        folder (Path):

    Returns:
        list[Path]: "NAME_2.png", "NAME_3.png" ... where NAME.png is taken.
    """

    def identity(path):
        return os.path.realpath(path).casefold()  # one file on file systems that ignore case, and two names here

    taken = {identity(image) for image in images}
    paths = []
    for image in images:
        names = itertools.chain([image.stem], (f"{image.stem}_{number}" for number in itertools.count(2)))
        path = next(path for path in (folder / f"{name}.png" for name in names) if identity(path) not in taken)
        taken.add(identity(path))
        paths.append(path)
    return paths


def _load_cfg(args, overrides):
    from ..config import load_cfg
    from ..config_files import find_config

    config_file = find_config(args.config_file)
    cfg = load_cfg(config_file, [PANOPTIC_KEY, str(args.confidence), *overrides], trust=args.trust)
    if args.weights:
        cfg.MODEL.WEIGHTS = args.weights
    elif "MODEL.WEIGHTS" not in overrides[::2]:
        cfg.MODEL.WEIGHTS = _last_checkpoint(config_file) or cfg.MODEL.WEIGHTS
    if not cfg.MODEL.WEIGHTS:
        raise UserError(
            f'MODEL.WEIGHTS is "" in {args.config_file}: there is no trained model to predict with. Give '
            "--weights FILE, or the config.yaml in the output folder of a finished run."
        )
    logger.info(f"Weights: {cfg.MODEL.WEIGHTS}")
    return cfg


def _last_checkpoint(config_file):
    """The newest checkpoint of the run that wrote the config, else None. Its MODEL.WEIGHTS are what it started from."""
    from torch import nn

    from ..checkpoint import PrecisionCheckpointer

    folder, name = os.path.split(config_file)
    if name not in ("config.yaml", "config_stock.yaml"):
        return None
    candidates = PrecisionCheckpointer(nn.Identity(), folder or ".").resume_candidates()
    return next(filter(os.path.isfile, candidates), None)


def _make_folder(folder):
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error}. Name a folder that can.") from error


def _predict_all(args, cfg, images, skipped):
    from PIL import Image

    from ..predictions import at_confidence, draw, to_records
    from ..predictor import Predictor

    predictor = Predictor(cfg, trust=args.trust)
    folder = Path(args.output)
    pictures = dict(zip(images, output_paths(images, folder)))
    records, done = [], []
    try:
        for path, image in _read_images(images, skipped):
            everything = predictor(image)
            predictions = at_confidence(everything, args.confidence)
            Image.fromarray(draw(image, predictions, predictor.metadata)).save(pictures[path])
            found = to_records(predictions, predictor.metadata, str(path))
            scores = everything["instances"].scores.tolist() if "instances" in everything else []
            records += found
            done.append({"image": str(path), "output": str(pictures[path]), "objects": len(found),
                         "highest_score": max(scores, default=None)})  # fmt: skip
    finally:  # what was done before an interruption is kept
        predictions_file = folder / "predictions.json"
        predictions_file.write_text(json.dumps(records), encoding="utf-8")
    summary = {
        "images": done,
        "skipped": [{"image": name, "reason": reason} for name, reason in skipped.items()],
        "predictions": str(predictions_file),
        "weights": predictor.cfg.MODEL.WEIGHTS,
        "device": predictor.cfg.MODEL.DEVICE,
        "precision": predictor.policy.precision,
        "confidence": args.confidence,
    }
    print(json.dumps(summary, indent=2) if args.json else _for_people(summary))
    return 1 if skipped else 0


def _read_images(paths, skipped):
    """Yields (path, image), an array (H, W, 3) in BGR order, and shows the progress; notes in `skipped` what fails."""
    from detectron2.data.detection_utils import read_image
    from tqdm import tqdm

    with tqdm(total=len(paths), unit="image", disable=not sys.stderr.isatty()) as bar:
        for number, path in enumerate(paths, 1):
            if bar.disable:
                print(f"[{number}/{len(paths)}] {path}", file=sys.stderr)
            bar.set_postfix_str(path.name)
            try:
                image = read_image(str(path), format="BGR")
            except Exception as error:  # decoders raise nearly everything, and the other images can be read
                skipped[str(path)] = (str(error).splitlines() or [type(error).__name__])[0]
                bar.clear()
                logger.warning(f"{path} is skipped, it cannot be read: {skipped[str(path)]}")
            else:
                yield path, image
            bar.update()


def _for_people(summary):
    images, skipped = summary["images"], summary["skipped"]
    objects = sum(image["objects"] for image in images)
    folder = os.path.dirname(summary["predictions"]) or "."
    lines = [f"{len(images)} image(s), {objects} object(s). The pictures and predictions.json are in {folder}."]
    highest = max((image["highest_score"] or 0 for image in images), default=0)
    if images and not objects:
        lines.append(f"The highest score was {highest:.2g}, and --confidence {summary['confidence']:g} leaves it out.")
    if skipped:
        lines.append(f"Skipped: {', '.join(item['image'] for item in skipped)}.")
    return "\n".join(lines)
