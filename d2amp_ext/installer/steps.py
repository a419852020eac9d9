"""The steps of `d2amp setup`: torch and torchvision, pkg_resources, cv2, Detectron2. Needs only the standard library.

Every step looks before it acts: what imports is kept, and what a stopped call left is found and finished.
"""

import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from .._compat import MIN_TORCH
from .environment import NEW, CommandFailed, brings
from .probe import version_tuple
from .wheel import SAL_DETECTRON2, WheelError, repack

OFFICIAL = "https://github.com/facebookresearch/detectron2"
REACH_SECONDS = 12  # for the official repository to answer
SETUPTOOLS = "setuptools<81"  # 82 removed pkg_resources, which detectron2.model_zoo imports
OPENCV = "opencv-python-headless"  # Detectron2's Visualizer imports cv2, which its setup does not ask for
PYTHON = f'"{sys.executable}"' if " " in sys.executable else sys.executable
PIP = f"{PYTHON} -m pip"
AGAIN = f"{PYTHON} -m d2amp_ext.setup_detectron2"

# What breaks an old Detectron2 that is found: how the error of its import reads, what to type, and why.
KNOWN_BREAKS = (
    (r"has no attribute '(LINEAR|ANTIALIAS)'", f'{PIP} install "pillow<10"', "this Pillow is too new for it"),
    (r"has no attribute '(bool|int|float|object)'", f'{PIP} install "numpy<1.24"', "this numpy is too new for it"),
)


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to type."""


class Setup:
    """One run of the set-up.

    Args:
        environment: what is looked at and acted on, an `Environment`.
        source: where a Detectron2 comes from if there is none: `auto`, `official` or `index`.
        dry_run: say what would be done, do nothing.
    """

    def __init__(self, environment, source="auto", dry_run=False):
        self.environment = environment
        self.source = source
        self.dry_run = dry_run

    def run(self):
        """Makes torch, torchvision, pkg_resources, cv2 and Detectron2 importable.

        Returns:
            dict or None: the probe after that, see `probe.probe`; None after a dry run that found work to do.

        Raises:
            SetupError: one of them is there and must not be replaced, or could not be installed.
            CommandFailed: pip failed.
        """
        seen = self.environment.read_stamp()
        if seen:
            return seen
        if self.dry_run:
            seen = self._ensure(stopped_in="")
            return seen if all(found["ok"] for found in seen.values()) else None
        with self.environment.lock() as stopped_in:
            seen = self._ensure(stopped_in)
            self.environment.mark("")
            self.environment.write_stamp(seen)
            return seen

    def _ensure(self, stopped_in):
        if stopped_in not in ("", NEW):
            say(f"The last set-up was stopped while it installed {stopped_in}; going on with it.")
        if stopped_in:
            self._repair()
        say("Looking at what this Python imports ...")
        seen = self._ensure_torch(self.environment.probe())
        seen = self._ensure_pkg_resources(seen)
        seen = self._ensure_cv2(seen)
        return self._ensure_detectron2(seen, stopped_in)

    # torch and torchvision

    def _ensure_torch(self, seen):
        """Keeps a pair that imports, else installs one; returns the probe after that."""
        torch, vision = seen["torch"], seen["torchvision"]
        if torch["ok"] and version_tuple(torch["version"]) < MIN_TORCH:
            raise SetupError(
                f"torch {torch['version']} is older than {'.'.join(map(str, MIN_TORCH))}, the oldest that d2amp-ext "
                f"works with. It was left as it is. To replace it, type:\n"
                f"    {PIP} install --upgrade torch torchvision\nthen:\n    {AGAIN}"
            )
        if torch["ok"] and vision["ok"]:
            say(f"torch {torch['version']} and torchvision {vision['version']} are there: kept.")
            return seen
        for name in ("torch", "torchvision"):
            if seen[name]["found"] and not seen[name]["ok"]:
                say(f"{name} is there, but does not work: {first_line(seen[name]['error'])}")
        # A torch that works stays: pip then looks for the torchvision that was made for it.
        # Its distribution is asked for: `torch.__version__` may name a build ("+cu130") that pip does not know of.
        wanted = f"torch=={torch['owners'].get('torch', torch['version'])}" if torch["ok"] else "torch"
        seen = self._pip(seen, "torch", "install", wanted, "torchvision")
        if self.dry_run:
            return seen
        broken = [name for name in ("torch", "torchvision") if not seen[name]["ok"]]
        if broken:  # pip takes them for installed, but their files, or those of what they need, are not whole
            self._repair()
            seen = self._reinstall(seen, {name: v for part in broken for name, v in seen[part]["owners"].items()})
        for name in ("torch", "torchvision"):
            if not seen[name]["ok"]:
                raise SetupError(
                    f"{name} was installed but does not work: {seen[name]['error']}\nInstall a torch and a torchvision "
                    f"that fit this machine and each other, as PyTorch's own guide says, then type:\n    {AGAIN}"
                )
        return seen

    def _repair(self):
        """Installs again what an installer was stopped in the middle of; Detectron2 has its own way."""
        parts = {name: v for name, v in self.environment.incomplete().values() if not brings(name, "detectron2")}
        if parts:
            say(f"Not wholly installed: {', '.join(parts)}.")
            self._reinstall(None, parts)

    def _reinstall(self, seen, distributions):
        if not distributions:
            return seen
        wanted = [f"{name}=={version}" for name, version in distributions.items()]
        return self._pip(seen, "torch", "install", "--force-reinstall", "--no-deps", *wanted)

    # pkg_resources

    def _ensure_pkg_resources(self, seen):
        if not seen["pkg_resources"]["ok"]:
            say("pkg_resources is missing: setuptools 82 removed it, and Detectron2's model_zoo imports it.")
            seen = self._pip(seen, "setuptools", "install", SETUPTOOLS)
            if not self.dry_run and not seen["pkg_resources"]["ok"]:
                raise SetupError(f"pkg_resources still does not import: {seen['pkg_resources']['error']}")
        return seen

    # cv2

    def _ensure_cv2(self, seen):
        if not seen["cv2"]["ok"]:
            why = first_line(seen["cv2"]["error"]) if seen["cv2"]["found"] else "there is none"
            say(f"cv2 does not import ({why}); Detectron2 draws pictures with it.")
            seen = self._pip(seen, "opencv", "install", OPENCV)
            if not self.dry_run and not seen["cv2"]["ok"]:
                raise SetupError(f"cv2 still does not import: {seen['cv2']['error']}")
        return seen

    # Detectron2

    def _ensure_detectron2(self, seen, stopped_in):
        """Keeps a Detectron2 that is there, else installs one; returns the probe after that."""
        found = seen["detectron2"]
        if stopped_in == "detectron2" and self._is_leftover(found):
            self.environment.discard_leftover("detectron2")
        elif found["ok"]:
            say(f"Detectron2 {found['version']} is there: kept.")
            return seen
        elif found["found"] or found["owners"]:
            if self.dry_run and not seen["torch"]["ok"]:
                say("Detectron2 is there; whether it works will show when torch is there.")
                return seen
            raise SetupError(_broken_detectron2(found))
        seen = self._install_detectron2(seen)
        if not self.dry_run and not seen["detectron2"]["ok"]:
            raise SetupError(_broken_detectron2(seen["detectron2"]))
        return seen

    def _is_leftover(self, found):
        """Whether what there is of Detectron2 was left by the set-up that was stopped: there was none before it."""
        incomplete = {name for name, _ in self.environment.incomplete().values()}
        inside = not found["found"] or self.environment.is_inside(found["file"])
        return inside and set(found["owners"]) <= incomplete

    def _install_detectron2(self, seen):
        """Installs from the first source that can be had."""
        if self.source != "index":
            reason = self._why_not_official()
            if reason is None:
                try:
                    return self._install_official(seen)
                except CommandFailed as error:
                    _stop_if_killed(error)
                    print(error.output, end="", flush=True)
                    reason = str(error)
            if self.source == "official":
                raise SetupError(f"The official Detectron2 cannot be installed: {reason}.\nThen type:\n    {AGAIN}")
            say(f"Not the official Detectron2: {reason}.")
        try:
            return self._install_from_index(seen)
        except (CommandFailed, WheelError) as error:
            _stop_if_killed(error)
            print(getattr(error, "output", ""), end="", flush=True)
            raise SetupError(
                f"{SAL_DETECTRON2.requirement} cannot be installed: {error}.\nIs a package index within reach? "
                f"`{PIP} config list` shows which is asked. Or install Detectron2 as its INSTALL.md says:\n"
                f"    {PIP} install --no-build-isolation git+{OFFICIAL}\nthen type:\n    {AGAIN}"
            ) from error

    def _why_not_official(self):
        """Why the official repository cannot be built here, or None."""
        if not self.environment.which("git"):
            return "there is no git on the PATH"
        if not self.environment.which(*_compilers()):
            return "there is no C++ compiler on the PATH"
        say(f"Asking for {OFFICIAL} (at most {REACH_SECONDS} s) ...")
        error = self.environment.why_unreachable(OFFICIAL, REACH_SECONDS)
        return error and f"{OFFICIAL} cannot be reached ({error})"

    def _install_official(self, seen):
        say("Building Detectron2 from its repository. That takes some minutes.")
        slow = {"GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "15", "GIT_TERMINAL_PROMPT": "0"}
        return self._pip(seen, "detectron2", "install", "--no-build-isolation", f"git+{OFFICIAL}", env=slow)

    def _install_from_index(self, seen):
        say(f"Taking {SAL_DETECTRON2.requirement} from the package index, as pure Python.")
        # It is tagged for CPython 3.10 only; nothing that is kept of it depends on that.
        tags = ("--python-version", "3.10", "--implementation", "cp", "--only-binary", ":all:")
        with tempfile.TemporaryDirectory(prefix="d2amp-setup-") as folder:
            self._pip(None, "", "download", "--no-deps", *tags, "--dest", folder, SAL_DETECTRON2.requirement)
            if self.dry_run:
                say("would take its compiled module away and install the rest")
                return seen
            wheels = list(Path(folder).glob("*.whl"))
            if len(wheels) != 1:
                raise WheelError(f"pip left {len(wheels)} wheels, expected one")
            return self._pip(seen, "detectron2", "install", str(repack(wheels[0], folder, SAL_DETECTRON2)))

    def _pip(self, seen, part, *arguments, env=None):
        """Runs pip, noting meanwhile what it installs, or says that it would.

        Args:
            seen: the probe before; None: there is no need of one after.
            part: what is being installed.

        Returns:
            dict or None: the probe after.
        """
        if self.dry_run:
            say(f"would run: {PIP} {' '.join(arguments)}")
            return seen
        self.environment.mark(part)
        try:
            self.environment.pip(*arguments, env=env)
        except CommandFailed as error:
            if error.status > 0:  # pip came to its end and put things back; a killed one did not
                self.environment.mark("")
            raise
        self.environment.mark("")
        return seen and self.environment.probe()


def _broken_detectron2(found):
    """What to say of a Detectron2 that is there and does not import."""
    owners = " ".join(found["owners"])
    if not found["found"]:
        lines = [f"The package {owners} is registered as installed, but the module detectron2 is not there. Type:"]
        return "\n".join([*lines, f"    {PIP} uninstall -y {owners}", "then:", f"    {AGAIN}"])
    where = Path(found["file"]).parent
    lines = [f"The Detectron2 in {where} does not import, and it is never replaced. Why:", f"    {found['error']}"]
    known = next((f"{mend}     ({why})" for pattern, mend, why in KNOWN_BREAKS if re.search(pattern, found["error"])), None)
    missing = (found["missing"] or "detectron2").split(".")[0]
    if known:
        lines += ["Type:", f"    {known}", "or take it away:"]
    elif missing != "detectron2":
        lines += [f"It needs the module {missing}. Type:", f"    {PIP} install {missing}", "or take it away:"]
    else:
        lines += ["Mend it, or take it away:"]
    lines.append(f"    {PIP} uninstall -y {owners}" if owners else f"    remove {where}, or take it off PYTHONPATH")
    return "\n".join([*lines, "then:", f"    {AGAIN}"])


def _stop_if_killed(error):
    """Raises again what a signal ended: the way on is the same call again, not another source."""
    if isinstance(error, CommandFailed) and error.status < 0:
        raise error


def _compilers():
    """Names of C++ compilers, the configured one first."""
    configured = (sysconfig.get_config_var("CXX") or "").split()[:1]
    return [*configured, "c++", "g++", "clang++", "cl"]


def first_line(text):
    """The first line of an error that may have many; "" for None."""
    return (text or "").strip().split("\n")[0]


def say(text):
    """Prints one line of progress at once."""
    print(text, flush=True)
