"""The set-up of torch and Detectron2: its decisions with a pretended environment, its parts on real files."""

import base64
import copy
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from d2amp_ext import setup_detectron2
from d2amp_ext.installer import environment as setup_environment
from d2amp_ext.installer import probe as setup_probe
from d2amp_ext.installer import steps as setup_steps
from d2amp_ext.installer import venv as setup_venv
from d2amp_ext.errors import UserError
from d2amp_ext.installer.environment import NEW, CommandFailed, Environment
from d2amp_ext.installer.steps import Setup, SetupError
from d2amp_ext.installer.wheel import NOTE_NAME, SAL_DETECTRON2, Edit, Recipe, WheelError, repack

ROOT = Path(__file__).resolve().parent.parent
SITE = "/env/lib/site-packages"


def there(name, version, **more):
    """The probe of a package that works."""
    found = {"found": True, "ok": True, "version": version, "file": f"{SITE}/{name}/__init__.py", "error": None}
    return {**found, "missing": None, "owners": {name: version}, **more}


def absent(name):
    """The probe of a package that is not there."""
    found = {"found": False, "ok": False, "version": None, "file": None, "error": "it is not installed"}
    return {**found, "missing": name, "owners": {}}


def broken(name, error, **more):
    """The probe of a package that is there and does not import."""
    return {**there(name, None), "ok": False, "error": error, "owners": {name: "1.0"}, **more}


WORKING = {
    "torch": there("torch", "2.6.0+cpu", build="no CUDA", owners={"torch": "2.6.0"}),
    "torchvision": there("torchvision", "0.21.0"),
    "pkg_resources": there("pkg_resources", None, owners={"setuptools": "80.0"}),
    "cv2": there("cv2", "4.12.0", owners={"opencv-python-headless": "4.12.0.88"}),
    "detectron2": there("detectron2", "0.6", compiled_error="No module named 'detectron2._C'"),
}
EMPTY = {name: absent(name) for name in WORKING}


class PretendedEnvironment:
    """Answers as `Environment` does, from a script, and remembers what it was asked to do.

    Args:
        seen: what the probe says at first.
        effects: list of (text, change): a call of pip whose arguments hold the text changes what the probe says: to
            the entries of a dict, or by raising an exception.
    """

    def __init__(
        self, seen, effects=(), stopped_in="", incomplete=None, unreachable="no route", programs=("git", "c++")
    ):
        self.seen = copy.deepcopy(seen)
        self.effects = list(effects)
        self.stopped_in = stopped_in
        self.left = {Path(f"/x/{name}.dist-info"): (name, version) for name, version in (incomplete or {}).items()}
        self.unreachable = unreachable
        self.programs = programs
        self.calls, self.marks, self.discarded, self.asked = [], [], [], []
        self.stamp = self.written = None

    def probe(self):
        return copy.deepcopy(self.seen)

    def incomplete(self):
        return self.left

    def which(self, *names):
        return next((name for name in names if name in self.programs), None)

    def pip(self, *arguments, env=None):
        line = " ".join(arguments)
        self.calls.append(line)
        if "download" in arguments:
            fake_wheel(Path(arguments[arguments.index("--dest") + 1]))
        for text, change in self.effects:
            if text in line:
                if isinstance(change, BaseException):
                    raise change
                self.seen.update(change)
                return

    def why_unreachable(self, repository, seconds):
        self.asked.append((repository, seconds))
        return self.unreachable

    def discard_leftover(self, module):
        self.discarded.append(module)
        self.seen[module] = absent(module)
        self.left = {}

    def is_inside(self, path):
        return path.startswith(SITE)

    def lock(self):
        environment = self

        class Lock:
            def __enter__(self):
                return environment.stopped_in

            def __exit__(self, *error):
                return False

        return Lock()

    def mark(self, part):
        self.marks.append(part)

    def read_stamp(self):
        return self.stamp

    def write_stamp(self, seen):
        self.written = seen


def installs(*names):
    """An effect of pip: these packages work afterwards."""
    return {name: WORKING[name] for name in names}


FULL = [("torchvision", installs("torch", "torchvision")), ("setuptools", installs("pkg_resources")),
        ("opencv", installs("cv2"))]  # fmt: skip
D2_BY_INDEX = ("-py3-none-any.whl", installs("detectron2"))
D2_OFFICIAL = ("git+", installs("detectron2"))


def fake_wheel(folder, extra=None, **changes):
    """Writes a small wheel made as sal-detectron2's is, and returns its path."""
    info = "fake_detectron2-0.7.2.dist-info"
    files = {
        "detectron2/_C.cpython-310-x86_64-linux-gnu.so": b"\x7fELF",
        "detectron2/__init__.py": b"__version__ = '0.7.2'\n",
        "detectron2/masks.py": "# \u00e9\nmask = np.array(mask, copy=False)\n".encode(),
        "tools/__init__.py": b"",
        "tools/train_net.py": b"raise SystemExit\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fake-detectron2\nVersion: 0.7.2\nRequires-Dist: numpy<2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp310-cp310-linux_x86_64\n",
        f"{info}/top_level.txt": b"detectron2\ntools\n",
        f"{info}/RECORD": b"detectron2/_C.cpython-310-x86_64-linux-gnu.so,sha256=wrong,4\n",
        **(extra or {}),
    }
    files = {name: changes.get(name.rsplit("/", 1)[-1].split(".")[0], content) for name, content in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "fake_detectron2-0.7.2-cp310-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


FAKE = Recipe(
    requirement="fake-detectron2==0.7.2",
    sha256=None,
    drop=(r"detectron2/_C\.[^/]*$", r"tools/__init__\.py$"),
    share=("tools/", "share/detectron2/tools/"),
    edits=(
        Edit("METADATA", "Requires-Dist: numpy<2\n", "Requires-Dist: numpy\n", "numpy 2 works"),
        Edit("top_level.txt", "tools\n", "", "no tools"),
        Edit("detectron2/masks.py", "np.array(mask, copy=False)", "np.asarray(mask)", "numpy 2"),
    ),
)


@pytest.fixture(autouse=True)
def fake_recipe(monkeypatch):
    monkeypatch.setattr(setup_steps, "SAL_DETECTRON2", FAKE)


# The decisions


def test_what_is_there_is_kept():
    environment = PretendedEnvironment(WORKING)
    assert Setup(environment).run() == WORKING
    assert environment.calls == [] and environment.asked == []
    assert environment.written == WORKING


def test_a_stamp_saves_the_probe(monkeypatch):
    environment = PretendedEnvironment(EMPTY)
    environment.stamp = WORKING
    monkeypatch.setattr(environment, "probe", lambda: pytest.fail("probed in spite of the stamp"))
    assert Setup(environment).run() == WORKING
    assert environment.calls == []


def test_empty_machine_without_the_official_repository(capsys):
    environment = PretendedEnvironment(EMPTY, [*FULL, D2_BY_INDEX])
    assert Setup(environment).run() == WORKING
    torch, setuptools, opencv, download, install = environment.calls
    assert torch == "install torch torchvision"
    assert setuptools == "install setuptools<81" and opencv == "install opencv-python-headless"
    assert download.startswith("download --no-deps --python-version 3.10") and download.endswith(FAKE.requirement)
    assert install.startswith("install ") and install.endswith("fake_detectron2-0.7.2-py3-none-any.whl")
    assert environment.asked == [(setup_steps.OFFICIAL, setup_steps.REACH_SECONDS)]
    assert "cannot be reached (no route)" in capsys.readouterr().out
    assert environment.marks[-1] == "" and {"torch", "setuptools", "opencv", "detectron2"} <= set(environment.marks)


def test_empty_machine_with_the_official_repository():
    environment = PretendedEnvironment(EMPTY, [*FULL, D2_OFFICIAL], unreachable=None)
    Setup(environment).run()
    assert environment.calls[3:] == [f"install --no-build-isolation git+{setup_steps.OFFICIAL}"]


@pytest.mark.parametrize("programs, why", [(("c++",), "no git"), (("git",), "no C++ compiler")])
def test_official_needs_programs(programs, why, capsys):
    state = {**WORKING, "detectron2": absent("detectron2")}
    environment = PretendedEnvironment(state, [D2_BY_INDEX], programs=programs)
    Setup(environment).run()
    assert environment.asked == []
    assert why in capsys.readouterr().out
    assert len(environment.calls) == 2
    with pytest.raises(SetupError, match=why.replace("+", r"\+")):
        Setup(PretendedEnvironment(EMPTY, FULL, programs=programs), source="official").run()


def test_a_build_that_fails_gives_way_to_the_index(capsys):
    failed = ("git+", CommandFailed(["pip"], 1, "error: Python.h: No such file\n"))
    environment = PretendedEnvironment(EMPTY, [*FULL, failed, D2_BY_INDEX], unreachable=None)
    assert Setup(environment).run() == WORKING
    assert "Python.h" in capsys.readouterr().out
    only_official = PretendedEnvironment(EMPTY, [*FULL, failed, D2_BY_INDEX], unreachable=None)
    with pytest.raises(SetupError, match="official Detectron2 cannot be installed"):
        Setup(only_official, source="official").run()
    assert not any("download" in call for call in only_official.calls)


def test_a_killed_pip_is_not_a_reason_for_another_source():
    environment = PretendedEnvironment(EMPTY, [*FULL, ("git+", CommandFailed(["pip"], -9))], unreachable=None)
    with pytest.raises(CommandFailed):
        Setup(environment).run()
    assert environment.marks[-1] == "detectron2"  # for the next call to know
    assert environment.written is None


def test_source_index_asks_nobody_else():
    environment = PretendedEnvironment(EMPTY, [*FULL, D2_BY_INDEX], unreachable=None)
    Setup(environment, source="index").run()
    assert environment.asked == [] and len(environment.calls) == 5


def test_no_index_either():
    failed = ("download", CommandFailed(["pip", "download"], 1))
    environment = PretendedEnvironment(EMPTY, [*FULL, failed])
    with pytest.raises(SetupError, match="pip config list"):
        Setup(environment).run()


@pytest.mark.parametrize(
    "found, expected",
    [
        (broken("detectron2", "ImportError: undefined symbol"), "pip uninstall -y detectron2"),
        (broken("detectron2", "ModuleNotFoundError: No module named 'fvcore'", missing="fvcore"), "pip install fvcore"),
        (broken("detectron2", "AttributeError: module 'PIL.Image' has no attribute 'LINEAR'"), '"pillow<10"'),
        (broken("detectron2", "AttributeError: module 'numpy' has no attribute 'bool'.\nMore"), '"numpy<1.24"'),
        (broken("detectron2", "SyntaxError: invalid", owners={}), f"remove {Path(SITE, 'detectron2')}"),
        ({**absent("detectron2"), "owners": {"sal-detectron2": "0.7.2"}}, "pip uninstall -y sal-detectron2"),
    ],
)
def test_a_broken_detectron2_is_explained_and_not_replaced(found, expected):
    environment = PretendedEnvironment({**WORKING, "detectron2": found}, [D2_BY_INDEX])
    with pytest.raises(SetupError) as error:
        Setup(environment).run()
    assert expected in str(error.value)
    if found["found"]:
        assert found["error"] in str(error.value) and "never replaced" in str(error.value)
    assert environment.calls == [] and environment.discarded == [] and environment.asked == []


def test_an_old_torch_is_left_alone():
    environment = PretendedEnvironment({**WORKING, "torch": there("torch", "2.3.1")})
    with pytest.raises(SetupError, match=r"2\.3\.1 is older than 2\.4"):
        Setup(environment).run()
    assert environment.calls == []


def test_a_torch_without_torchvision_is_kept():
    environment = PretendedEnvironment(
        {**WORKING, "torchvision": absent("torchvision")}, [("torchvision", installs("torchvision"))]
    )
    Setup(environment).run()
    # By the version that pip knows; torch calls itself 2.6.0+cpu.
    assert environment.calls == ["install torch==2.6.0 torchvision"]


def test_a_torch_that_was_stopped_half_way_is_finished():
    lost = broken("torch", "OSError: libtorch_global_deps.so", owners={"torch": "2.6.0"})
    environment = PretendedEnvironment(
        {**WORKING, "torch": lost, "torchvision": broken("torchvision", "OSError", owners={"torchvision": "0.21.0"})},
        [("--no-deps torch==2.6.0 torchvision==0.21.0", installs("torch", "torchvision"))],
        stopped_in="torch",
        incomplete={"nvidia-cublas": "13.1", "sal-detectron2": "0.7.2"},
    )
    assert Setup(environment).run() == WORKING
    again = "install --force-reinstall --no-deps"
    assert environment.calls[0] == f"{again} nvidia-cublas==13.1"  # not Detectron2, which has its own way
    assert environment.calls[1] == "install torch torchvision"
    assert environment.calls[-1] == f"{again} torch==2.6.0 torchvision==0.21.0"


def test_a_torch_that_cannot_be_mended_is_an_error():
    environment = PretendedEnvironment({**WORKING, "torch": broken("torch", "OSError: libgomp.so.1")})
    with pytest.raises(SetupError, match="torch was installed but does not work: OSError: libgomp"):
        Setup(environment).run()
    assert environment.written is None


def test_cv2_which_detectron2_draws_with_is_installed_and_a_working_one_kept():
    environment = PretendedEnvironment({**WORKING, "cv2": absent("cv2")}, FULL)
    Setup(environment).run()
    assert environment.calls == ["install opencv-python-headless"]
    with pytest.raises(SetupError, match="cv2 still does not import"):
        Setup(PretendedEnvironment({**WORKING, "cv2": absent("cv2")})).run()


def test_pkg_resources_is_brought_back():
    environment = PretendedEnvironment({**WORKING, "pkg_resources": absent("pkg_resources")}, FULL)
    Setup(environment).run()
    assert environment.calls == ["install setuptools<81"]
    with pytest.raises(SetupError, match="pkg_resources still does not import"):
        Setup(PretendedEnvironment({**WORKING, "pkg_resources": absent("pkg_resources")})).run()


def test_a_detectron2_that_was_stopped_half_way_is_finished():
    half = broken("detectron2", "ImportError: cannot import name 'cfg'", owners={"sal-detectron2": "0.7.2"})
    state = {**WORKING, "detectron2": half}
    environment = PretendedEnvironment(state, [D2_BY_INDEX], "detectron2", {"sal-detectron2": "0.7.2"})
    assert Setup(environment).run() == WORKING
    assert environment.discarded == ["detectron2"] and len(environment.calls) == 2


@pytest.mark.parametrize(
    "stopped_in, incomplete, file",
    [
        ("torch", {"sal-detectron2": "0.7.2"}, f"{SITE}/detectron2/__init__.py"),  # it was there before
        (NEW, {"sal-detectron2": "0.7.2"}, f"{SITE}/detectron2/__init__.py"),
        ("detectron2", {}, f"{SITE}/detectron2/__init__.py"),  # wholly installed
        ("detectron2", {"sal-detectron2": "0.7.2"}, "/home/me/detectron2/__init__.py"),  # elsewhere
    ],
)
def test_only_our_own_leftovers_are_removed(stopped_in, incomplete, file):
    theirs = broken("detectron2", "ImportError: x", owners={"sal-detectron2": "0.7.2"}, file=file)
    environment = PretendedEnvironment({**WORKING, "detectron2": theirs}, [D2_BY_INDEX], stopped_in, incomplete)
    with pytest.raises(SetupError, match="never replaced"):
        Setup(environment).run()
    assert environment.discarded == [] and environment.calls == []


def test_dry_run_only_talks(capsys, monkeypatch):
    environment = PretendedEnvironment(EMPTY)
    monkeypatch.setattr(environment, "lock", lambda: pytest.fail("a dry run took the lock"))
    assert Setup(environment, dry_run=True).run() is None
    assert environment.calls == [] and environment.marks == [] and environment.written is None
    out = capsys.readouterr().out
    for command in ("pip install torch torchvision", "pip install setuptools<81", f"{FAKE.requirement}"):
        assert command in out
    assert Setup(PretendedEnvironment(WORKING), dry_run=True).run() == WORKING


# The command line


def run_main(monkeypatch, environment, *argv):
    monkeypatch.setattr(setup_detectron2, "Environment", lambda quiet: environment)
    return setup_detectron2.main(list(argv))


def test_the_summary_says_what_is_missing(monkeypatch, capsys, tmp_path):
    assert run_main(monkeypatch, PretendedEnvironment(WORKING)) == 0
    out = capsys.readouterr().out
    assert "torch       2.6.0+cpu (no CUDA) with torchvision 0.21.0" in out
    assert "no rotated boxes, no deformable convolution" in out and "No module named 'detectron2._C'" in out
    assert "uninstall -y detectron2" in out and "--source official" in out
    compiled = {**WORKING, "detectron2": {**WORKING["detectron2"], "compiled_error": None}}
    assert run_main(monkeypatch, PretendedEnvironment(compiled)) == 0
    out = capsys.readouterr().out
    assert "nothing is missing" in out and "rotated" not in out
    (tmp_path / "sal_detectron2-0.7.2.dist-info").mkdir()
    (tmp_path / "sal_detectron2-0.7.2.dist-info" / NOTE_NAME).touch()
    ours = there("detectron2", "0.7.2", file=f"{tmp_path}/detectron2/__init__.py", compiled_error="none")
    assert run_main(monkeypatch, PretendedEnvironment({**WORKING, "detectron2": ours})) == 0
    assert "as pure Python" in capsys.readouterr().out


def test_exit_status(monkeypatch, capsys):
    old = PretendedEnvironment({**WORKING, "torch": there("torch", "1.13.0")})
    assert run_main(monkeypatch, old) == 1
    assert "1.13.0 is older" in capsys.readouterr().err
    failing = PretendedEnvironment(EMPTY, [("torch", CommandFailed(["pip"], 1, "no space left\n"))])
    assert run_main(monkeypatch, failing) == 1
    assert "no space left" in capsys.readouterr().err and failing.marks[-1] == ""
    stopped = PretendedEnvironment(EMPTY, [("torch", KeyboardInterrupt())])
    assert run_main(monkeypatch, stopped) == 130
    assert "To go on, type" in capsys.readouterr().err and stopped.marks[-1] == "torch"
    with pytest.raises(SystemExit) as usage:
        setup_detectron2.main(["--source", "elsewhere"])
    assert usage.value.code == 2


def test_it_needs_only_the_standard_library():
    code = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] not in sys.stdlib_module_names | {"d2amp_ext"}:
                    raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        sys.meta_path.insert(0, Block())
        from d2amp_ext.setup_detectron2 import main
        try:
            main(["--help"])
        except SystemExit as end:
            assert end.code == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout


# The wheel


def test_repack(tmp_path):
    wheel = repack(fake_wheel(tmp_path / "in"), tmp_path, FAKE)
    assert wheel.name == "fake_detectron2-0.7.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = "fake_detectron2-0.7.2.dist-info"
    assert not [name for name in files if "_C." in name or name.startswith("tools")]
    assert files["fake_detectron2-0.7.2.data/data/share/detectron2/tools/train_net.py"] == b"raise SystemExit\n"
    assert files["detectron2/masks.py"].decode() == "# \u00e9\nmask = np.asarray(mask)\n"
    assert files["detectron2/__init__.py"] == b"__version__ = '0.7.2'\n"
    assert files[f"{info}/METADATA"].endswith(b"Requires-Dist: numpy\n")
    assert files[f"{info}/top_level.txt"] == b"detectron2\n"
    assert b"Root-Is-Purelib: true" in files[f"{info}/WHEEL"] and b"Tag: py3-none-any" in files[f"{info}/WHEEL"]
    assert b"detectron2/masks.py: numpy 2" in files[f"{info}/{NOTE_NAME}"]
    record = {}
    for line in files[f"{info}/RECORD"].decode().splitlines():
        name, digest, size = line.split(",")
        record[name] = (digest, size)
    assert set(record) == set(files) and record.pop(f"{info}/RECORD") == ("", "")
    for name, (digest, size) in record.items():
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(files[name])), name


def test_pip_installs_and_knows_the_repacked_wheel(tmp_path):
    wheel = repack(fake_wheel(tmp_path / "in"), tmp_path, FAKE)
    target = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    assert sorted(path.name for path in target.iterdir() if path.name != "bin") == [
        "detectron2",
        "fake_detectron2-0.7.2.dist-info",
        "share",
    ]
    assert (target / "share" / "detectron2" / "tools" / "train_net.py").is_file()
    assert setup_probe.incomplete_distributions([target], target / "bin") == {}
    assert "masks.py" in (target / "fake_detectron2-0.7.2.dist-info" / "RECORD").read_text()


@pytest.mark.parametrize(
    "changes, recipe, message",
    [
        ({"masks": b"mask = np.asarray(mask)\n"}, FAKE, "0 times, expected once"),
        ({"masks": b"np.array(mask, copy=False)\n" * 2}, FAKE, "2 times, expected once"),
        ({"extra": {"detectron2/other.so": b""}}, FAKE, "compiled code"),
        ({}, Recipe("x", "0" * 64, (), ()), "SHA-256"),
        ({}, Recipe("x", None, (), (Edit("detectron2/gone.py", "a", "b", ""),)), "no file detectron2/gone.py"),
        ({"extra": {"b-1.dist-info/METADATA": b""}}, FAKE, "2 .dist-info folders"),
    ],
)
def test_another_wheel_than_the_expected_one_is_refused(tmp_path, changes, recipe, message):
    with pytest.raises(WheelError, match=message):
        repack(fake_wheel(tmp_path / "in", **changes), tmp_path, recipe)
    assert not list(tmp_path.glob("*.whl"))


def test_a_cut_wheel_is_refused(tmp_path):
    wheel = fake_wheel(tmp_path / "in")
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(WheelError, match="not a whole wheel"):
        repack(wheel, tmp_path, FAKE)


@pytest.mark.soak
def test_the_real_wheel_can_be_repacked(tmp_path):
    options = ["--no-deps", "--python-version", "3.10", "--only-binary", ":all:", "--dest", str(tmp_path / "in")]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, SAL_DETECTRON2.requirement], check=True)
    (wheel,) = (tmp_path / "in").iterdir()
    with zipfile.ZipFile(repack(wheel, tmp_path, SAL_DETECTRON2)) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert len([name for name in names if name.startswith("detectron2/")]) > 250
    assert {name.split("/")[0] for name in names} == {"detectron2", *(f"sal_detectron2-0.7.2.{kind}" for kind in ("dist-info", "data"))}


def test_the_repacked_detectron2_reads_images_with_todays_numpy(tmp_path):
    import detectron2

    site = Path(detectron2.__file__).parent.parent
    if not any(site.glob(f"*detectron2*.dist-info/{NOTE_NAME}")):
        pytest.skip("the Detectron2 of this environment is not the one that the set-up repacks")
    import numpy
    import torch
    from PIL import Image

    from detectron2.evaluation.sem_seg_evaluation import load_image_into_numpy_array
    from detectron2.layers.mask_ops import paste_mask_in_image_old

    pixels = numpy.arange(12, dtype=numpy.uint8).reshape(3, 4)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for copied in (False, True):
        loaded = load_image_into_numpy_array(str(tmp_path / "a.png"), copy=copied, dtype=int)
        assert loaded.dtype == int and (loaded == pixels).all()
    mask = paste_mask_in_image_old(torch.ones(4, 4), torch.tensor([1.0, 1.0, 4.0, 4.0]), 8, 8, 0.5)
    assert mask.sum() == 16 and mask[1:5, 1:5].all()


# The probe


def write_package(folder, name, source="", version="1.0", installer="pip\n"):
    """A module `name` and its .dist-info, as pip leaves them."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=x,{len(source)}\n{name}-{version}.dist-info/METADATA,,\n")
    if installer:
        (info / "INSTALLER").write_text(installer)
    return info


TORCH_STUB = "__version__ = '9.9.0'\nzeros = lambda *shape: shape\nclass version: cuda = None\n"
VISION_STUB = "class ops:\n    @staticmethod\n    def nms(boxes, scores, threshold): return []\n"


def test_probe_reports_each_kind(tmp_path, monkeypatch):
    write_package(tmp_path, "torch", TORCH_STUB, "9.9.0")
    write_package(tmp_path, "torchvision", "raise OSError('libtorch.so: no such file')")
    write_package(tmp_path, "detectron2", "import os; print('noise', flush=True); os._exit(7)")
    (tmp_path / "pkg_resources").mkdir()  # a folder of that name is not the module
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "onlyhere").mkdir(parents=True)
    (elsewhere / "onlyhere" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(elsewhere)
    seen = setup_probe.probe(names=("torch", "torchvision", "onlyhere", "yacs_of_nobody", "detectron2", "after"))
    assert seen["torch"]["ok"] and seen["torch"]["version"] == "9.9.0" and seen["torch"]["build"] == "no CUDA"
    assert seen["torch"]["owners"] == {"torch": "9.9.0"}
    assert not seen["torchvision"]["ok"] and seen["torchvision"]["error"] == "OSError: libtorch.so: no such file"
    assert seen["torchvision"]["found"] and seen["torchvision"]["missing"] is None
    assert not seen["onlyhere"]["found"]  # the folder that we stand in does not count
    assert not seen["yacs_of_nobody"]["found"] and seen["yacs_of_nobody"]["missing"] == "yacs_of_nobody"
    assert seen["detectron2"]["found"] and "crashed" in seen["detectron2"]["error"]
    assert not seen["after"]["ok"] and "crashed" in seen["after"]["error"]


def test_probe_sees_half_removed_packages_as_absent(tmp_path, monkeypatch):
    info = write_package(tmp_path, "detectron2")
    info.rename(tmp_path / "~etectron2-1.0.dist-info")
    (tmp_path / "detectron2").rename(tmp_path / "~etectron2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; sys.path[:] = [p for p in sys.path if '-packages' not in p]\n" + setup_probe._PROBE_SOURCE
    report = tmp_path / "report"
    subprocess.run([sys.executable, "-c", code, str(report), "detectron2"], check=True)
    name, seen = json.loads(report.read_text())
    assert not seen["found"] and seen["owners"] == {}


def test_probe_gives_up_on_an_import_that_hangs(tmp_path, monkeypatch):
    write_package(tmp_path, "torch", "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    seen = setup_probe.probe(names=("torch",), timeout=2)
    assert time.monotonic() - start < 20
    assert seen["torch"]["found"] and "hung" in seen["torch"]["error"]


def test_probe_of_this_environment():
    seen = setup_probe.probe()
    assert seen["torch"]["ok"] and seen["torchvision"]["ok"] and seen["detectron2"]["ok"], seen
    assert setup_probe.version_tuple(seen["torch"]["version"]) >= (2, 4)


def test_incomplete_distributions(tmp_path):
    write_package(tmp_path, "whole", "x = 1\n")
    write_package(tmp_path, "distro", "x = 1\n", installer=None)  # without INSTALLER, but all there
    (write_package(tmp_path, "norecord", installer=None) / "RECORD").unlink()
    write_package(tmp_path, "cut", "x = 1\n", installer=None)
    (tmp_path / "cut" / "__init__.py").write_text("x")
    write_package(tmp_path, "lost", "x = 1\n", installer=None)
    shutil.rmtree(tmp_path / "lost")
    for name in ("noscript", "script"):
        info = write_package(tmp_path, name, installer=None)
        (info / "entry_points.txt").write_text(f"[console_scripts]\nrun-{name} = {name}:main\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run-script").touch()
    (write_package(tmp_path, "nometadata", installer=None) / "METADATA").unlink()
    write_package(tmp_path, "aside", installer=None).rename(tmp_path / "~side-1.0.dist-info")
    (tmp_path / "~side-1.0.dist-info" / "RECORD").unlink()
    found = setup_probe.incomplete_distributions([tmp_path], tmp_path / "bin")
    assert sorted(name for name, _ in found.values()) == ["cut", "lost", "norecord", "noscript"]
    assert set(version for _, version in found.values()) == {"1.0"}


def test_fingerprint_follows_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = setup_probe.fingerprint()
    assert setup_probe.fingerprint() == before
    info = write_package(tmp_path, "something")
    added = setup_probe.fingerprint()
    assert added != before
    os.utime(info / "RECORD", (1, 1))
    assert setup_probe.fingerprint() not in (before, added)
    shutil.rmtree(info)
    assert setup_probe.fingerprint() == before


# What is done to the environment


def test_the_stamp_is_trusted_only_while_nothing_changes(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    environment = Environment(prefix=tmp_path)
    assert environment.read_stamp() is None
    environment.write_stamp(WORKING)
    assert environment.read_stamp() == WORKING
    info = write_package(tmp_path / "site", "new")
    assert environment.read_stamp() is None
    environment.write_stamp(WORKING)
    shutil.rmtree(info)
    assert environment.read_stamp() is None
    (tmp_path / ".d2amp-setup.json").write_text("{torn")
    assert environment.read_stamp() is None
    Environment(prefix=tmp_path / "not" / "there").write_stamp(WORKING)  # no folder, no stamp, no error


def test_the_stamp_does_not_outlive_a_removed_torch(tmp_path, monkeypatch):
    site = tmp_path / "site"
    write_package(site, "torch")
    monkeypatch.setenv("PYTHONPATH", str(site))

    def in_a_new_process(action):
        start = f"from d2amp_ext.installer.environment import Environment; e = Environment(prefix={str(tmp_path)!r})"
        code = f"{start}; {action}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    in_a_new_process("e.write_stamp({'some': 'probe'})")
    assert in_a_new_process("print(e.read_stamp())") == "{'some': 'probe'}"
    shutil.rmtree(site / "torch")  # its .dist-info stays
    assert in_a_new_process("print(e.read_stamp())") == "None"


def test_a_killed_setup_leaves_word_of_what_it_did(tmp_path):
    code = f"""
        import os, signal
        from d2amp_ext.installer.environment import Environment
        environment = Environment(prefix={str(tmp_path)!r})
        with environment.lock() as stopped_in:
            assert stopped_in == ""
            environment.mark("torch and much more")
            environment.mark("torch")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    assert done.returncode == -9
    environment = Environment(prefix=tmp_path)
    with environment.lock() as stopped_in:
        assert stopped_in == "torch"
        environment.mark("")
    with environment.lock() as stopped_in:
        assert stopped_in == ""


@pytest.mark.skipif(setup_environment.fcntl is None, reason="file locks of POSIX")
def test_a_pip_that_outlives_its_setup_is_waited_for(tmp_path):
    # `pip` is here a sleep that notes when it ends.
    code = f"""
        import os, signal, subprocess, sys
        from d2amp_ext.installer import environment as setup_environment
        real = subprocess.run
        def pretended(command, **options):
            sleep = "import time; time.sleep(3); open('{tmp_path}/ended', 'w').close()"
            options = {{"pass_fds": options["pass_fds"]}}
            subprocess.Popen([sys.executable, "-c", sleep], **options)
            os.kill(os.getpid(), signal.SIGKILL)
        setup_environment.subprocess.run = pretended
        environment = setup_environment.Environment(prefix={str(tmp_path)!r})
        with environment.lock():
            environment.mark("torch")
            environment.pip("install", "torch")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "ended").exists()
    with Environment(prefix=tmp_path).lock() as stopped_in:
        assert (tmp_path / "ended").exists()
        assert stopped_in == "torch"


def test_a_prefix_that_cannot_be_written_to_is_no_obstacle(tmp_path):
    environment = Environment(prefix=tmp_path / "missing")
    with environment.lock() as stopped_in:
        assert stopped_in == ""
        environment.mark("torch")


def test_leftovers_are_removed_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_environment.sysconfig, "get_path", lambda kind: str(tmp_path))
    (write_package(tmp_path, "detectron2", installer=None) / "RECORD").unlink()
    (tmp_path / "detectron2-1.0.dist-info").rename(tmp_path / "sal_detectron2-1.0.dist-info")
    (tmp_path / "sal_detectron2-1.0.dist-info" / "METADATA").write_text("Name: sal-detectron2\nVersion: 1.0\n")
    other = write_package(tmp_path, "yacs", installer=None)
    (other / "RECORD").unlink()
    Environment(prefix=tmp_path).discard_leftover("detectron2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["yacs", "yacs-1.0.dist-info"]
    assert "left by an installation that was stopped" in capsys.readouterr().out
    environment = Environment(prefix=tmp_path)
    assert environment.is_inside(tmp_path / "detectron2" / "__init__.py")
    assert not environment.is_inside(tmp_path.parent / "detectron2" / "__init__.py")


@pytest.mark.parametrize("quiet", [False, True])
def test_pip_that_fails(quiet, capfd):
    with pytest.raises(CommandFailed) as error:
        Environment(quiet=quiet).pip("install", "--no-index", "d2amp-no-such-package")
    assert error.value.status == 1
    shown = capfd.readouterr()
    assert ("d2amp-no-such-package" in error.value.output) == quiet
    assert ("No matching distribution" in shown.out + shown.err) != quiet


def test_python_without_pip(monkeypatch):
    monkeypatch.setattr(setup_environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandFailed) as error:
        Environment().pip("install", "torch")
    assert "-m ensurepip" in error.value.output


@pytest.fixture
def silent_server():
    """The address of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/detectron2"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
class TestReachingARepository:
    def test_no_answer(self, silent_server, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        start = time.monotonic()
        assert Environment().why_unreachable(silent_server, 1.5) == "no answer within 1.5 s"
        assert time.monotonic() - start < 6
        assert setup_steps.REACH_SECONDS <= 15
        listing = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True).stdout
        assert silent_server not in listing  # git's helper holds the connection, and ended with it

    def test_refused(self, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{closed.getsockname()[1]}/detectron2"
        reason = Environment().why_unreachable(address, 10)
        assert reason and "127.0.0.1" in reason and "\n" not in reason

    def test_answer(self, tmp_path):
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
        assert Environment().why_unreachable(str(tmp_path), 10) is None


# The virtual environment


def test_make_venv_keeps_the_torch_of_its_python(tmp_path, monkeypatch):
    stubs = tmp_path / "stubs"
    write_package(stubs, "torch", TORCH_STUB)
    write_package(stubs, "torchvision", VISION_STUB)
    monkeypatch.setenv("PYTHONPATH", f"{stubs}{os.pathsep}{ROOT}")
    folder = tmp_path / "venv"
    done = subprocess.run(
        [sys.executable, "-m", "d2amp_ext.setup_detectron2", "--make-venv", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "will use torch 9.9.0" in done.stdout
    assert "include-system-site-packages = true" in (folder / "pyvenv.cfg").read_text()
    assert (folder / ".d2amp-setup.lock").read_text() == NEW
    # Also what is installed in the environment of this Python, which is one step further away.
    monkeypatch.delenv("PYTHONPATH")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    where = "import importlib.util, sys; print(importlib.util.find_spec('pytest').origin)"
    origin = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(origin).samefile(pytest.__file__)


def test_make_venv_starts_empty_without_a_torch_that_will_do(tmp_path, monkeypatch):
    commands = []

    def pretended(command, **options):
        commands.append(command)
        folder = Path(command[-1])
        folder.mkdir()
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(setup_venv.subprocess, "run", pretended)
    for number, torch in enumerate((absent("torch"), there("torch", "2.3.0"), broken("torch", "OSError"))):
        monkeypatch.setattr(setup_venv, "probe", lambda names: {"torch": torch, "torchvision": WORKING["torchvision"]})
        setup_venv.make_venv(tmp_path / f"venv{number}")
    assert len(commands) == 3
    assert all("--system-site-packages" not in command and "--clear" in command for command in commands)


def test_make_venv_spares_other_folders(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").touch()
    monkeypatch.setattr(setup_venv, "probe", lambda **options: pytest.fail("went on"))
    with pytest.raises(UserError, match="not a virtual environment"):
        setup_venv.make_venv(tmp_path)
    assert setup_detectron2.main(["--make-venv", str(tmp_path)]) == 2
    assert "name another folder" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
