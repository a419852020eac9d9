"""Rewrites a downloaded wheel of Detectron2 as pure Python. Needs only the standard library.

The only Detectron2 of today on the package index is `sal-detectron2`, built for CPython 3.10. Its Python code runs on
every version, but its compiled module does not, it brings a top-level package `tools` that belongs to nobody, and it
asks for a numpy older than 2. `repack` mends this, so that pip can install (and uninstall) what is left.
"""

import base64
import csv
import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

NOTE_NAME = "D2AMP_CHANGES.txt"  # in the .dist-info folder: what was changed, and the mark by which we know our own


class WheelError(Exception):
    """The wheel is not the one that is expected here."""


@dataclass(frozen=True)
class Edit:
    """A replacement of text that must be found exactly once.

    Attributes:
        path: file inside the wheel; `METADATA` and `top_level.txt` are looked for in the .dist-info folder.
        old: text to be found.
        new: text to put there.
        why: one line for the note in the wheel.
    """

    path: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Recipe:
    """What to do with one wheel.

    Attributes:
        requirement: as pip takes it.
        sha256: of the wheel file, in hex; None accepts any (tests only).
        drop: regular expressions; files whose path matches from its start are left out.
        share: a folder of the wheel that is installed under the prefix of the environment instead, and where there.
        edits: replacements, each found exactly once.
    """

    requirement: str
    sha256: str | None
    drop: tuple[str, ...]
    edits: tuple[Edit, ...]
    share: tuple[str, str] | None = None


SAL_DETECTRON2 = Recipe(
    requirement="sal-detectron2==0.7.2",
    sha256="491af0c7f79bdb2d178e46f6cb16a97c4ac968d45c41ea3f6b6435d59bbee561",
    drop=(r"detectron2/_C\.[^/]*$", r"tools/__init__\.py$"),
    share=("tools/", "share/detectron2/tools/"),
    edits=(
        Edit(
            "METADATA",
            "Requires-Dist: numpy<2\n",
            "Requires-Dist: numpy\nRequires-Dist: fvcore\nRequires-Dist: iopath\nRequires-Dist: setuptools<82\n",
            "runs on numpy 2; fvcore, iopath and pkg_resources (setuptools < 82) are imported but were not named",
        ),
        Edit("top_level.txt", "tools\n", "", "Detectron2's scripts are no package `tools` but files under share/detectron2/tools"),
        Edit(
            "detectron2/layers/mask_ops.py",
            "mask = np.array(mask, copy=False)",
            "mask = np.asarray(mask)",
            "numpy 2 refuses copy=False where a copy is needed",
        ),
        Edit(
            "detectron2/evaluation/sem_seg_evaluation.py",
            "np.array(Image.open(f), copy=copy, dtype=dtype)",
            "np.array(Image.open(f), copy=copy or None, dtype=dtype)",
            "numpy 2 refuses copy=False where a copy is needed",
        ),
    ),
)


def repack(wheel, target_dir, recipe):
    """Writes a pure-Python copy of a wheel, tagged `py3-none-any`.

    Args:
        wheel: path of the downloaded wheel.
        target_dir: folder for the new one.
        recipe: what to leave out and what to change.

    Returns:
        Path: the new wheel.

    Raises:
        WheelError: the file is not the wheel that the recipe was written for, or still holds compiled code.
    """
    wheel = Path(wheel)
    data = wheel.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if recipe.sha256 is not None and found != recipe.sha256:
        raise WheelError(f"{wheel.name} has the SHA-256 {found}, expected {recipe.sha256}: it was tampered with or cut")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    except zipfile.BadZipFile as error:
        raise WheelError(f"{wheel.name} is not a whole wheel: {error}") from error

    info_dir = _info_dir(wheel, files)
    files = {name: data for name, data in files.items() if not any(re.match(pattern, name) for pattern in recipe.drop)}
    if recipe.share:
        source, target = recipe.share
        data_dir = f"{info_dir.removesuffix('.dist-info')}.data/data/{target}"
        files = {re.sub(f"^{re.escape(source)}", data_dir, name): data for name, data in files.items()}
    for edit in recipe.edits:
        _apply(files, info_dir, edit, wheel.name)
    compiled = [name for name in files if name.endswith((".so", ".pyd", ".dylib"))]
    if compiled:
        raise WheelError(f"{wheel.name} holds compiled code besides what is left out: {', '.join(compiled)}")

    files[f"{info_dir}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: d2amp-ext\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info_dir}/{NOTE_NAME}"] = _note(wheel.name, recipe).encode()
    for signature in ("RECORD", "RECORD.jws", "RECORD.p7s"):
        files.pop(f"{info_dir}/{signature}", None)
    files[f"{info_dir}/RECORD"] = _record(files, f"{info_dir}/RECORD")

    target = Path(target_dir) / f"{info_dir.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():  # .dist-info stays last, as the wheel's authors are asked to write it
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return target


def _info_dir(wheel, files):
    """The one `NAME-VERSION.dist-info` folder of the wheel."""
    folders = {name.split("/")[0] for name in files if re.match(r"[^/]+\.dist-info/METADATA$", name)}
    if len(folders) != 1:
        raise WheelError(f"{wheel.name} has {len(folders)} .dist-info folders, expected one")
    return folders.pop()


def _apply(files, info_dir, edit, wheel_name):
    """Makes one replacement in place."""
    path = edit.path if "/" in edit.path else f"{info_dir}/{edit.path}"
    if path not in files:
        raise WheelError(f"{wheel_name} has no file {path}")
    text = files[path].decode("utf-8")
    if text.count(edit.old) != 1:
        raise WheelError(f"{wheel_name}: {path} holds {edit.old!r} {text.count(edit.old)} times, expected once")
    files[path] = text.replace(edit.old, edit.new).encode("utf-8")


def _note(wheel_name, recipe):
    """What was done to the wheel, for whoever opens the installed files."""
    lines = [f"Made from {wheel_name} by `d2amp setup`. The files are those of that wheel, except:", ""]
    lines += [f"- left out: everything that matches {pattern}" for pattern in recipe.drop]
    lines += [f"- {edit.path}: {edit.why}" for edit in recipe.edits]
    return "\n".join(lines) + "\n"


def _record(files, record_path):
    """The RECORD file: path, hash and size of every other file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([record_path, "", ""])
    return out.getvalue().encode()
