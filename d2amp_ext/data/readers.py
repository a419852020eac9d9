"""Reads what a data set on disk says about itself: COCO annotation files, and folders in PASCAL VOC's layout.

Both find the class names without opening an image. Errors are UserErrors about the file; the caller adds which setting
named it.
"""

import json
import os
import re
import xml.etree.ElementTree
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError

# PASCAL's own order of classes, by which its models are numbered.
PASCAL_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class CocoFile:
    """A COCO instances file.

    Attributes:
        categories: category id -> class name, in the order of ids, which is that of the class indices.
        first_image: the file name of an image, to see whether the images are where they should be.
    """

    categories: Mapping[int, str]
    first_image: str


def read_coco(json_file: str) -> CocoFile:
    """Read and check a COCO instances file, so that Detectron2 can load it. A file without annotations is for tests.

    Args:
        json_file: a path that Detectron2's PathManager can read.

    Raises:
        UserError: the file is missing, is not JSON, or is not a COCO instances file.
    """
    from detectron2.utils.file_io import PathManager

    try:
        with PathManager.open(json_file, "r", encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise UserError(
            f"the annotation file {json_file} cannot be read: {error.strerror or error}. Check the path."
        ) from error
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(
            f"{json_file} does not parse as JSON: {error}. If it was cut off while being copied, copy it again."
        ) from error
    try:
        return _check_coco(content)
    except KeyError as error:
        problem = f"an entry lacks {error}"
    except (TypeError, AttributeError):
        problem = "its entries are not objects"
    except UserError as error:
        problem = str(error)
    raise UserError(
        f"{json_file} is not a COCO instances file: {problem}. It needs the lists images (id, file_name, height, "
        "width), annotations (id, image_id, category_id, bbox) and categories (id, name)."
    )


def _check_coco(content: object) -> CocoFile:
    if not isinstance(content, dict):
        raise UserError(f"it holds a {type(content).__name__}, not an object")
    for key in ("images", "categories"):
        if not isinstance(content.get(key), list):
            raise UserError(f"it has no list {key}")
        if not content[key]:
            raise UserError(f"{key} is empty" + (", so there is no class" if key == "categories" else ""))
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    sizes = {image["id"]: (image["file_name"], image["height"], image["width"]) for image in content["images"]}
    annotations = content.get("annotations", [])
    for key, by_id in (("categories", names), ("images", sizes)):
        if len(by_id) != len(content[key]):
            raise UserError(f"two {key} have the same id")
    owners = {}
    for annotation in annotations:
        if "segments_info" in annotation:
            raise UserError("it holds panoptic annotations")
        number, category, box = annotation["id"], annotation["category_id"], annotation["bbox"]
        if category not in names:
            raise UserError(f"annotation {number} has the category_id {category}, which no category has")
        if len(box) != 4:
            raise UserError(f"annotation {number} has the bbox {box}, not [x, y, width, height]")
        if annotation.get("ignore"):
            raise UserError(f"annotation {number} has ignore, which Detectron2 does not know; iscrowd 1 does that")
        owners[number] = annotation["image_id"]
    if len(owners) != len(annotations):
        raise UserError("two annotations have the same id")
    return CocoFile(dict(sorted(names.items())), content["images"][0]["file_name"])


@dataclass(frozen=True)
class VocFolder:
    """One split of a folder in PASCAL VOC's layout.

    Attributes:
        dirname: the folder, with Annotations, ImageSets/Main and JPEGImages.
        split: ImageSets/Main/SPLIT.txt lists the images.
        year: 2007 or 2012: whose definition of AP PASCAL's evaluator takes. From the folder's name, else 2012.
        thing_classes: class names, in the order of the class indices.
        annotations: image id -> the root of its XML file.
        evaluation_problem: what PASCAL's evaluator would fail on, or "".
    """

    dirname: str
    split: str
    year: int
    thing_classes: tuple[str, ...]
    annotations: Mapping[str, xml.etree.ElementTree.Element]
    evaluation_problem: str

    def load(self) -> list[dict]:
        """The split in Detectron2's data set format, with boxes. Objects marked difficult are in it, as in Detectron2.

        Raises:
            UserError: an image is missing.
        """
        from detectron2.structures import BoxMode

        folder = os.path.join(self.dirname, "JPEGImages")
        files = {}
        for name in sorted(os.listdir(folder)):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in _IMAGE_SUFFIXES:
                files.setdefault(stem, os.path.join(folder, name))
        records = []
        for image_id, root in self.annotations.items():
            if image_id not in files:
                raise UserError(
                    f"{folder} has no image {image_id} ({', '.join(_IMAGE_SUFFIXES)}), which {self.split}.txt lists."
                )
            height, width = _size(root, files[image_id])
            objects = [
                {
                    "category_id": self.thing_classes.index(name),
                    # PASCAL counts pixels from 1 and includes the last: pixel 1 alone covers [0, 1)
                    "bbox": [box[0] - 1, box[1] - 1, box[2], box[3]],
                    "bbox_mode": BoxMode.XYXY_ABS,
                }
                for name, box in _objects(root)
            ]
            record = {"file_name": files[image_id], "image_id": image_id, "height": height, "width": width}
            records.append({**record, "annotations": objects})
        return records


def read_voc(dirname: str, split: str) -> VocFolder:
    """Read the annotations of one split of a VOC-like folder.

    The class names are those of all annotations of the folder, so that its splits agree: sorted, or in PASCAL's order
    when all are PASCAL's. In a folder called after PASCAL (2007 or 2012 in its name) they are all 20 of PASCAL's.

    Raises:
        UserError: a folder, list or file is missing or cannot be read, or there is no object.
    """
    for part in ("", "Annotations", "JPEGImages"):
        if not os.path.isdir(os.path.join(dirname, part)):
            raise UserError(
                f"there is no folder {os.path.join(dirname, part)}. A VOC folder has Annotations/*.xml, "
                "ImageSets/Main/SPLIT.txt and JPEGImages/."
            )
    annotations = {image_id: _read_xml(dirname, image_id) for image_id in _image_ids(dirname, split)}
    names = {name for root in annotations.values() for name, _ in _objects(root)}
    year = re.search("2007|2012", os.path.basename(os.path.normpath(dirname)))
    if year and names <= set(PASCAL_CLASSES):
        classes = PASCAL_CLASSES
    else:
        for file in os.scandir(os.path.join(dirname, "Annotations")):
            image_id, suffix = os.path.splitext(file.name)
            if suffix == ".xml" and image_id not in annotations:
                names.update(name for name, _ in _objects(_read_xml(dirname, image_id)))
        classes = tuple(sorted(names))
        if names <= set(PASCAL_CLASSES):
            classes = tuple(name for name in PASCAL_CLASSES if name in names)
    if not names:
        raise UserError(f"no annotation in {os.path.join(dirname, 'Annotations')} has an object, so there is no class.")
    problem = next(filter(None, (_evaluation_problem(*item) for item in annotations.items())), "")
    return VocFolder(dirname, split, int(year[0]) if year else 2012, classes, annotations, problem)


def _image_ids(dirname: str, split: str) -> list[str]:
    folder = os.path.join(dirname, "ImageSets", "Main")
    file = os.path.join(folder, f"{split}.txt")
    if not os.path.isfile(file):
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        splits = ", ".join(name[:-4] for name in names if name.endswith(".txt")) or "none"
        raise UserError(f"there is no split {split!r}, for there is no file {file}. Splits there: {splits}.")
    with open(file, encoding="utf-8-sig") as lines:
        image_ids = [line.strip() for line in lines if line.strip()]
    if not image_ids:
        raise UserError(f"{file} lists no image.")
    for image_id in image_ids:
        if len(image_id.split()) > 1:  # PASCAL's evaluator splits its lines at blanks
            raise UserError(f"{file} has the line {image_id!r}: a line must be one image id, which has no blanks.")
    return image_ids


def _read_xml(dirname: str, image_id: str) -> xml.etree.ElementTree.Element:
    file = os.path.join(dirname, "Annotations", f"{image_id}.xml")
    try:
        root = xml.etree.ElementTree.parse(file).getroot()
        _objects(root)
        return root
    except OSError as error:
        raise UserError(f"the annotation {file} cannot be read: {error.strerror or error}.") from error
    except xml.etree.ElementTree.ParseError as error:
        raise UserError(f"{file} does not parse as XML: {error}.") from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{file} has an object without a name, or without numbers for xmin, ymin, xmax and ymax in bndbox."
        ) from error


def _objects(root: xml.etree.ElementTree.Element) -> list[tuple[str, list[float]]]:
    """Class name and xmin, ymin, xmax, ymax, as written, of every object."""
    objects = []
    for node in root.iterfind("object"):
        name, *box = (node.findtext(tag) for tag in ("name", *_BOX))
        if not (name or "").strip():
            raise ValueError
        objects.append((name.strip(), [float(value) for value in box]))
    return objects


_BOX = ("bndbox/xmin", "bndbox/ymin", "bndbox/xmax", "bndbox/ymax")


def _evaluation_problem(image_id: str, root: xml.etree.ElementTree.Element) -> str:
    for node in root.iterfind("object"):
        for tag in ("truncated", "difficult", *_BOX):
            if not re.fullmatch(r"\s*[+-]?\d+\s*", node.findtext(tag) or ""):
                return f"Annotations/{image_id}.xml has an object whose {tag} is {node.findtext(tag)!r}, not an integer"
        if node.find("pose") is None:
            return f"Annotations/{image_id}.xml has an object without the tag pose"
        if node.findtext("name") != node.findtext("name").strip():
            return f"Annotations/{image_id}.xml has blanks around the name {node.findtext('name')!r}"
    return ""


def _size(root: xml.etree.ElementTree.Element, image_file: str) -> tuple[int, int]:
    """Height and width, from the annotation, or from the image where the annotation lacks them."""
    size = [root.findtext(f"size/{side}") or "" for side in ("height", "width")]
    if all(value.strip().isdigit() and int(value) > 0 for value in size):
        return int(size[0]), int(size[1])
    from PIL import Image

    with Image.open(image_file) as image:
        return image.height, image.width
