"""Finding and reading YAML config files: by path, packaged with d2amp_ext, or from Detectron2's model zoo."""

import difflib
import importlib.util
import re
from pathlib import Path

import yaml
from detectron2.utils.file_io import PathManager

from .errors import UserError

BASE_KEY = "_BASE_"


def packaged_dir():
    """The folder of the configs that come with d2amp_ext: inside an installed wheel, or beside the package."""
    here = Path(__file__).parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def zoo_dir():
    """The folder of Detectron2's own configs. Found without importing model_zoo, which needs pkg_resources."""
    package = Path(importlib.util.find_spec("detectron2").origin).parent
    installed = package / "model_zoo" / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name, relative_to=None):
    """The path of a config file.

    Args:
        name (str or Path): a path (or a URL that Detectron2 can open), the name of a packaged config such as
            "VOC/faster_rcnn_R_50_C4_bf16.yaml", or a name in Detectron2's zoo such as
            "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"; looked up in this order.
        relative_to (Path or None): the folder that a relative path starts from. None: the working directory.

    Raises:
        UserError: when there is no such file, with the nearest names.
    """
    text = str(name)
    if "://" in text:
        return text
    path = Path(text).expanduser()
    candidates = [path if relative_to is None else Path(relative_to) / path]
    candidates += [packaged_dir() / path, zoo_dir() / path]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    if candidates[0].is_dir():
        raise UserError(f"The config {text} is a folder. Name a .yaml or .py file in it.")
    raise UserError(
        f"The config {text} does not exist: not as a path from {Path(relative_to or '.').resolve()}, not among the "
        f"configs of d2amp_ext ({packaged_dir()}), not in Detectron2's zoo ({zoo_dir()}).{_nearest(text)}"
    )


def _nearest(name):
    known = {
        path.relative_to(root).as_posix()
        for root in (packaged_dir(), zoo_dir())
        for path in root.rglob("*.py" if name.endswith(".py") else "*.yaml")
    }  # fmt: skip
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        by_file = {entry.split("/")[-1]: entry for entry in known}
        near = [by_file[hit] for hit in difflib.get_close_matches(name.split("/")[-1], by_file, n=3, cutoff=0.6)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def read_yaml(filename, trust=False):
    """A config file as a nested dict, merged over what its `_BASE_` names.

    `_BASE_` is a name as `find_config` takes it, relative to the file, or a list of them of which later ones win.

    Args:
        filename (str): path or URL.
        trust (bool): whether YAML tags that run Python code are allowed.

    Raises:
        UserError: for an empty file, a file that is not YAML or no mapping, and tags that would run code.
    """
    return _read(str(filename), trust, ())


def _read(filename, trust, readers):
    if filename.endswith(".py"):
        raise UserError(f"The config {filename} is Python. For a LazyConfig use d2amp lazy; this command takes YAML.")
    if filename in readers:
        raise UserError(f"{BASE_KEY} goes in a circle: {' -> '.join((*readers, filename))}")
    try:
        with PathManager.open(filename, "r") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The config {filename} cannot be read as a text file: {error}") from error
    config = parse_yaml(text, filename, trust or _is_of_detectron2(filename))
    bases = config.pop(BASE_KEY, None) or []
    merged = {}
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"The config {filename} has {BASE_KEY} = {bases!r}. It must be the name of a config or a list of them.")
    for base in bases:
        folder = None if "://" in filename else Path(filename).resolve().parent
        _merge(_read(find_config(base, relative_to=folder), trust, (*readers, filename)), merged, filename)
    _merge(config, merged, filename)
    return merged


def _is_of_detectron2(filename):
    """Whether the file was installed with Detectron2, whose Base-RetinaNet.yaml computes its anchors by a tag."""
    return Path(filename).resolve().is_relative_to(zoo_dir().resolve())


def parse_yaml(text, filename, trust=False):
    """The mapping that YAML text holds. `filename` is for messages. Raises UserError, as `read_yaml` does."""
    try:
        config = yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        if not trust:
            line = error.problem_mark.line + 1 if error.problem_mark else "?"
            raise UserError(
                f"The config {filename}, line {line}, has a YAML tag that is no plain data and could run Python code "
                f"({error.problem}). Remove the tag, or pass --trust when you know where the file comes from."
            ) from error
        config = yaml.unsafe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"The config {filename} is not valid YAML. {_missing_colons(text) or error}") from error
    if config is None:
        raise UserError(f"The config {filename} is empty. Put at least one key into it, or leave --config-file out.")
    if not isinstance(config, dict):
        raise UserError(
            f"The config {filename} must hold `KEY: value` lines; found {type(config).__name__}. {_missing_colons(text)}"
        )
    return config


def _missing_colons(text):
    """Names the lines that hold a bare key above indented lines. PyYAML complains about the line after them."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1)
             if line.strip() and not line.lstrip().startswith("#")]  # fmt: skip
    found = []
    for (number, line), (_, following) in zip(lines, lines[1:]):
        is_bare_key = re.fullmatch(r"\s*[A-Za-z_][\w.]*\s*(#.*)?", line)
        if is_bare_key and _indent(following) > _indent(line):
            key = line.split("#")[0].strip()
            found.append(f"Line {number}, `{key}`, lacks its colon: write `{key}:`.")
    return " ".join(found)


def _indent(line):
    return len(line) - len(line.lstrip())


def _merge(source, target, filename):
    for key, value in source.items():
        if isinstance(value, dict) and key in target:
            if not isinstance(target[key], dict):
                raise UserError(f"The config {filename} makes a section of {key}, which is a value in its {BASE_KEY}.")
            _merge(value, target[key], filename)
        else:
            target[key] = value
