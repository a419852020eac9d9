"""What to think of the packages that are installed: judges what the set-up's probe saw."""

import json
import platform
import re
import sys
from pathlib import Path

from .._compat import MIN_LIGHTNING, MIN_TORCH, NO_LIGHTNING, SETUP_COMMAND
from ..installer.probe import incomplete_distributions, probe, version_tuple
from ..installer.steps import KNOWN_BREAKS, OFFICIAL, OPENCV, PIP, SETUPTOOLS, first_line
from ..installer.wheel import NOTE_NAME
from .lines import BAD, NOTE, OK, Line

NAMES = ("numpy", "PIL", "pkg_resources", "cv2", "torch", "torchvision", "detectron2", "lightning")
REBUILD = f"{PIP} install --force-reinstall --no-deps --no-build-isolation git+{OFFICIAL}"
COST = "rotated boxes and deformable convolution are missing, and COCO evaluation is slower"
SKIPPED = "the interpreter crashed or hung before it"


def see(names=NAMES, look=probe):
    """Probes packages, going on behind one that crashes the interpreter. Returns what `probe` does."""
    names, seen = list(names), {}
    while names:
        found = look(names=tuple(names))
        first = next((index for index, name in enumerate(names) if found[name]["error"] == SKIPPED and index), len(names))
        seen.update((name, found[name]) for name in names[:first])
        names = names[first:]
    return seen


def package_lines(seen):
    """Judges a probe of NAMES, and whether everything was installed to its end.

    Returns:
        list[Line]:
    """
    lines = [_python(), _torch(seen["torch"]), _torchvision(seen["torchvision"], seen["torch"])]
    lines += _detectron2(seen["detectron2"], seen["torch"])
    lines.append(_lightning(seen["lightning"]))
    absent = not (seen["detectron2"]["found"] or seen["detectron2"]["owners"])  # the set-up brings these with it
    for name, module, wanted in (("numpy", "numpy", "numpy"), ("Pillow", "PIL", "Pillow"), ("OpenCV", "cv2", OPENCV),
                                 ("pkg_resources", "pkg_resources", f'"{SETUPTOOLS}"')):  # fmt: skip
        lines.append(_needed(name, seen[module], wanted, absent))
    return lines + _incomplete()


def _python():
    facts = {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}
    return Line("Python", OK, f"{facts['version']}, {facts['executable']}, {facts['platform']}", facts=facts)


def _torch(found):
    if not found["ok"]:
        return _failed("torch", found, SETUP_COMMAND)
    if version_tuple(found["version"]) < MIN_TORCH:
        text = f"{found['version']} is older than {'.'.join(map(str, MIN_TORCH))}, the oldest that this package works with"
        return Line("torch", BAD, text, f"{PIP} install --upgrade torch torchvision", found)
    return Line("torch", OK, f"{found['version']} ({found['build']})", facts=found)


def _torchvision(found, torch):
    if found["ok"]:
        return Line("torchvision", OK, str(found["version"]), facts=found)
    if torch["ok"] and found["found"]:  # most often a pair that was not made for each other
        wanted = torch["owners"].get("torch", torch["version"])
        mend = f"{PIP} install --force-reinstall torch=={wanted} torchvision"
        return _failed("torchvision", found, mend)
    return _failed("torchvision", found, SETUP_COMMAND)


def _detectron2(found, torch):
    """Which one it is, and its compiled module."""
    if not found["ok"]:
        return [_failed("Detectron2", found, _mend_detectron2(found, torch))]
    kind, folder = which_detectron2(found), Path(found["file"]).parent
    text = f"{found['version']}, {kind}, in {folder}"
    facts = {**found, "kind": kind}
    if found.get("after_backward", True):
        lines = [Line("Detectron2", OK, text, facts=facts)]
    else:
        text += "\nolder than March 2023: it never calls after_backward of hooks"
        lines = [Line("Detectron2", NOTE, text, _replace(found), facts)]
    return [*lines, _compiled(found, kind)]


def which_detectron2(found):
    """Says which of the Detectron2s that are about one is: its version is 0.6 for four years of them."""
    folder = Path(found["file"]).parent.parent
    sal = next((name for name in found["owners"] if name.lower().startswith("sal")), None)
    if sal or version_tuple(found["version"]) >= (0, 7):
        kind = "sal-detectron2"
        if any(folder.glob(f"*detectron2*.dist-info/{NOTE_NAME}")):
            kind += " as pure Python"
    elif found.get("after_backward", True):
        kind = "the official one"
        for path in folder.glob("detectron2-*.dist-info/direct_url.json"):
            commit = json.loads(path.read_text(encoding="utf-8")).get("vcs_info", {}).get("commit_id", "")
            kind += f" at commit {commit[:8]}" if commit else ""
    else:
        kind = "an old 0.6"
    return kind if found["owners"] else f"{kind}, not installed by pip"


def _compiled(found, kind):
    """The module `_C`."""
    error = found["compiled_error"]
    if error is None:
        return Line("compiled ops", OK, "with CUDA" if found.get("compiled_cuda") else "for the CPU",
                    facts={"loads": True, "cuda": found.get("compiled_cuda")})  # fmt: skip
    facts = {"loads": False, "error": error}
    if re.search(r"No module named|cannot import name", error):
        return Line("compiled ops", NOTE, f"none: {COST}; all else trains and evaluates", _replace(found), facts)
    text = f"there, but it does not load, so {COST}. It was built for another torch or Python: {first_line(error)}"
    return Line("compiled ops", BAD, text, _replace(found) if kind.startswith("sal") else REBUILD, facts)


def compiled_without_cuda(seen, facts):
    """The line about a compiled module for the CPU on a machine with a GPU, or None."""
    found = seen["detectron2"]
    if not found["ok"] or found["compiled_error"] or found.get("compiled_cuda") or not (facts.get("cuda") or {}).get("devices"):
        return None
    text = "built without CUDA, on a machine with a GPU: rotated boxes and deformable convolution fail there"
    return Line("compiled ops", BAD, text, f"FORCE_CUDA=1 {REBUILD}", {"loads": True, "cuda": False})


def _replace(found):
    """The commands that put the official Detectron2 in place of this one."""
    if found["owners"]:
        return f"{PIP} uninstall -y {' '.join(found['owners'])} && {SETUP_COMMAND} --source official"
    return f"{SETUP_COMMAND} --source official     (when {Path(found['file']).parent} is off PYTHONPATH or taken away)"


def _mend_detectron2(found, torch):
    if not found["found"] and not found["owners"] or not torch["ok"]:
        return SETUP_COMMAND
    known = next((mend for pattern, mend, _ in KNOWN_BREAKS if re.search(pattern, found["error"])), None)
    missing = (found["missing"] or "detectron2").split(".")[0]
    if known or missing != "detectron2":
        return known or f"{PIP} install {missing}"
    return f"{PIP} uninstall -y {' '.join(found['owners'])} && {SETUP_COMMAND}" if found["owners"] else SETUP_COMMAND


def _lightning(found):
    install = f'{PIP} install "d2amp-ext[lightning]"'
    if not found["found"]:
        return Line("Lightning", OK, "not installed; only `d2amp lightning` needs it", facts=found)
    if not found["ok"]:
        return _failed("Lightning", found, install.replace("install", "install --upgrade", 1))
    least, end = (".".join(map(str, version)) for version in (MIN_LIGHTNING, NO_LIGHTNING))
    if MIN_LIGHTNING <= version_tuple(found["version"]) < NO_LIGHTNING:
        return Line("Lightning", OK, found["version"], facts=found)
    text = f"{found['version']}, but `d2amp lightning` needs >= {least} and < {end}"
    return Line("Lightning", NOTE, text, install, found)


def _needed(name, found, wanted, set_up):
    """A package that Detectron2 cannot do without.

    Args:
        name: for people.
        found: the probe of it.
        wanted: what pip installs.
        set_up: whether the set-up is to be run anyway, which brings it.
    """
    if not found["ok"]:
        mend = f"{PIP} install {'--force-reinstall ' if found['found'] else ''}{wanted}"
        if set_up and not found["found"]:
            mend = SETUP_COMMAND
        why = {"pkg_resources": "; setuptools 82 removed it, and Detectron2's model_zoo imports it",
               "OpenCV": "; Detectron2 draws pictures with it"}.get(name, "")  # fmt: skip
        return _failed(name, found, mend, why)
    owners = ", ".join(f"{owner} {version}" for owner, version in found["owners"].items() if owner.lower() != name.lower())
    version = found["version"] or f"of setuptools {found['owners'].get('setuptools', '')}".rstrip()
    return Line(name, OK, version + (f" ({owners})" if owners and found["version"] else ""), facts=found)


def _failed(name, found, mend, why=""):
    said = f"does not work: {first_line(found['error'])}" if found["found"] else "is not installed"
    return Line(name, BAD, said + why, mend, found)


def _incomplete():
    """Half-installed distributions, one line each."""
    lines = []
    for folder, (name, version) in incomplete_distributions().items():
        again = f"{PIP} install --force-reinstall --no-deps {name}=={version}" if name else f'rm -r "{folder}"'
        lines.append(Line(name or folder.name, BAD, f"not wholly installed ({folder})", again, {"folder": str(folder)}))
    return lines
