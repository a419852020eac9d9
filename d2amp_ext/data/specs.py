"""The grammar of `DATASETS.REGISTER`'s entries."""

import os
import re
from dataclasses import dataclass

from ..errors import UserError

_FORMS = '"name=coco:ANNOTATIONS.json:IMAGE_DIR" or "name=voc:DIR:SPLIT"'


@dataclass(frozen=True)
class Spec:
    """One entry of `DATASETS.REGISTER`, taken apart.

    Attributes:
        name: the data set's name.
        kind: "coco" or "voc".
        path: absolute path of the annotation file, or of the VOC folder.
        rest: absolute path of the image folder, or the name of the split.
    """

    name: str
    kind: str
    path: str
    rest: str

    def __str__(self) -> str:
        return f"{self.name}={self.kind}:{self.path}:{self.rest}"


def parse_spec(text: str) -> Spec:
    """Take one entry apart. `~` and environment variables are expanded; relative paths start at the working directory.

    Raises:
        UserError: it has none of the two forms.
    """
    match = re.fullmatch(r"([^=:\s]+)\s*=\s*(\w+)\s*:(.+)", str(text).strip(), flags=re.DOTALL)
    if match is None:
        raise UserError(f"it should have the form {_FORMS}.")
    name, kind, places = match[1], match[2].lower(), match[3]
    if kind not in ("coco", "voc"):
        raise UserError(f"the kind {match[2]!r} does not exist; it should have the form {_FORMS}.")
    separators = [i for i, letter in enumerate(places) if letter == ":" and _separates(places, i)]
    if len(separators) != 1:
        raise UserError(
            f"it should have the form {_FORMS}: {places!r} should be two parts with one colon between them. "
            "(The colon of a Windows drive is understood; a path with any other colon is not.)"
        )
    path, rest = places[: separators[0]].strip(), places[separators[0] + 1 :].strip()
    if not path or not rest:
        raise UserError(f"it should have the form {_FORMS}: {places!r} has an empty part.")
    if kind == "voc" and re.search(r"[\\/]", rest):
        raise UserError(f"it should have the form {_FORMS}: SPLIT is a name such as trainval, not the path {rest!r}.")
    return Spec(name, kind, _absolute(path), _absolute(rest) if kind == "coco" else rest)


def _separates(places: str, i: int) -> bool:
    """Whether the colon at `i` stands between two parts, not after a drive letter (C:\\x) or a protocol (s3://x)."""
    if places.startswith("://", i):
        return False
    starts_part = i == 1 or (i >= 2 and places[i - 2] == ":")
    return not (starts_part and places[i - 1].isalpha() and places[i + 1 : i + 2] in ("\\", "/"))


def _absolute(path: str) -> str:
    path = os.path.expanduser(os.path.expandvars(path))
    return path if "://" in path or re.match(r"[a-zA-Z]:[\\/]", path) else os.path.abspath(path)
