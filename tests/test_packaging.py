"""The wheel and the Makefile: what is in it, what it asks for, and that the commands of the README set things up."""

import email
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import d2amp_ext

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "output", "datasets", "build", "dist", "*.egg-info", "__pycache__")

# Put first on the path: importing one of these fails loudly.
BLOCKED = ("torch", "torchvision", "detectron2", "fvcore", "iopath", "numpy")


def run_python(code, site, cwd, *blocked):
    """Runs code with the wheel's files on the path and some packages out of reach; returns the finished process."""
    block = f"""
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Block())
    """
    source = textwrap.dedent(block) + textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-c", source], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, made from the source archive as on an index; with build isolation where an index can be reached."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_COPIED)
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in ("torch", "detectron2", "d2amp_ext"):
        (stubs / f"{name}.py").write_text("raise AssertionError('imported while building')\n")
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(folder / "source")]
    env = {**os.environ, "PYTHONPATH": str(stubs), "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "20"}
    for isolation in ([], ["--no-isolation"]):
        done = subprocess.run([*command, *isolation], env=env, cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder into which pip installed the wheel alone."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    return folder


def test_the_wheel_is_for_every_python(wheel):
    assert wheel.name == f"d2amp_ext-{d2amp_ext.__version__}-py3-none-any.whl"


def test_the_wheel_carries_every_config(names):
    configs = ROOT / "configs"
    expected = {
        f"d2amp_ext/configs/{path.relative_to(configs).as_posix()}"
        for path in configs.rglob("*")
        if path.suffix in (".yaml", ".py") and "__pycache__" not in path.parts
    }
    assert expected and {name for name in names if name.startswith("d2amp_ext/configs/")} == expected


def test_lazy_configs_in_subfolders_are_carried(tmp_path):
    shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_COPIED)
    deep = tmp_path / "source" / "configs" / "one" / "two"
    deep.mkdir(parents=True)
    for name in ("a.py", "b.yaml", "notes.txt"):
        (deep / name).write_text("")
    code = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "source", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "source").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        found = {name for name in archive.namelist() if "/one/" in name}
    assert found == {"d2amp_ext/configs/one/two/a.py", "d2amp_ext/configs/one/two/b.yaml"}


def test_the_wheel_carries_the_package_and_nothing_else(names):
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "d2amp_ext").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    code = {name for name in names if name.endswith(".py") and not name.startswith("d2amp_ext/configs/")}
    assert code == package
    assert "d2amp_ext/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"d2amp_ext", f"d2amp_ext-{d2amp_ext.__version__}.dist-info"}


def test_metadata(metadata):
    assert metadata["Name"] == "d2amp-ext" and metadata["Version"] == d2amp_ext.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    assert metadata.get_all("License-File") == ["LICENSE"]
    if (ROOT / "README.md").is_file():
        assert metadata.get_payload().strip().startswith((ROOT / "README.md").read_text(encoding="utf-8").strip()[:200])


def test_requirements(metadata):
    required, extras = set(), {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if marker:
            extras.setdefault(marker.split("==")[1].strip(" \"'"), set()).add(requirement)
        else:
            required.add(requirement)
    assert required == {"fvcore", "iopath", "packaging", "tensorboard"}
    assert set(metadata.get_all("Provides-Extra")) == set(extras) == {"lightning", "coco", "all", "test"}
    assert extras["lightning"] == {"lightning<2.7,>=2.4"}
    assert extras["coco"] == {"faster-coco-eval"}
    assert extras["all"] == extras["lightning"] | extras["coco"]
    assert extras["test"] >= {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "build"}


def test_the_licence_is_the_apache_one(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("LICENSE")]
        text = archive.read(name).decode()
    assert "Apache License" in text and "Version 2.0" in text


def test_the_command_is_installed(site, tmp_path):
    (script,) = (path for path in (site / "bin").iterdir() if path.stem == "d2amp")
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([str(script), "--version"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and d2amp_ext.__version__ in done.stdout, done.stderr


def test_importing_the_package_needs_nothing_and_is_fast(site, tmp_path):
    code = f"""
        import time
        start = time.perf_counter()
        import d2amp_ext
        seconds = time.perf_counter() - start
        assert d2amp_ext.__file__.startswith({str(site)!r}), d2amp_ext.__file__
        assert not {{"torch", "detectron2", "numpy"}} & set(sys.modules)
        assert "AMPTrainer" in dir(d2amp_ext)
        print(seconds)
    """
    seconds = []
    for _ in range(3):
        done = run_python(code, site, tmp_path, *BLOCKED)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.5


@pytest.mark.parametrize("blocked", [("detectron2",), ("torch", "torchvision"), BLOCKED[:3]])
def test_a_name_that_needs_what_is_missing_says_what_to_type(site, tmp_path, blocked):
    done = run_python("from d2amp_ext import AMPTrainer", site, tmp_path, *blocked)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "d2amp setup" in last, done.stderr


def test_the_setup_command_runs_without_torch_and_detectron2(site, tmp_path):
    code = "from d2amp_ext.cli import main; sys.exit(main(['setup', '--help']))"
    done = run_python(code, site, tmp_path, *BLOCKED)
    assert done.returncode == 0 and "--source" in done.stdout, done.stderr


# The Makefile, with a Python that writes down what it is asked to do.

FAKE_PYTHON = """\
#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
  -c*version_info*) exit "$OLD" ;;
  -c*) echo runs ;;
  --version) echo "Python 3.8.20" ;;
  *--make-venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/d2amp ;;
  *"$FAIL"*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the Makefile, and a function that calls make there and returns (status, commands, output)."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "d2amp_ext").mkdir()
    (folder / "d2amp_ext" / "setup_detectron2.py").touch()
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log = tmp_path / "log"
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV", "ARGS", "WORKERS"):  # those of the make that runs the tests
        monkeypatch.delenv(name, raising=False)

    def make(*arguments, where=folder, fail="no such thing", old="0"):
        log.write_text("")
        env = {**os.environ, "LOG": str(log), "FAIL": fail, "OLD": old}
        command = ["make", *arguments, f"PYTHON={python}"]
        done = subprocess.run(command, cwd=where, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        commands = [line for line in log.read_text().splitlines() if not line.startswith("-c")]
        return done.returncode, commands, done.stdout

    make.folder = folder
    return make


MAKE_VENV = "-m d2amp_ext.setup_detectron2 --make-venv .venv"
INSTALL = "-m pip install -e .[test]"
SETUP = "-m d2amp_ext.setup_detectron2"


def test_make_sets_up_once(checkout):
    status, commands, output = checkout("test", "ARGS=-k step")
    assert status == 0, output
    test = "-m pytest tests -q -m not soak -n auto --maxprocesses 4 --dist loadfile -k step"
    assert commands == [MAKE_VENV, INSTALL, SETUP, test]
    assert checkout("test", "ARGS=-k step")[1] == [test]
    assert checkout("demo")[1] == ["demo"]
    assert checkout("soak")[1] == ["-m pytest tests -q -m soak"]
    assert checkout("setup")[1] == []


def test_make_finishes_a_setup_that_was_stopped(checkout):
    status, commands, _ = checkout("demo", fail="pip install")
    assert status != 0 and commands == [MAKE_VENV, INSTALL]
    status, commands, _ = checkout("demo")
    assert status == 0 and commands == [INSTALL, SETUP, "demo"]  # what .venv holds already is not thrown away


def test_make_sets_up_again_when_it_has_to(checkout, tmp_path):
    checkout("setup")
    os.utime(checkout.folder / "setup.py", (4e9, 4e9))
    os.utime(checkout.folder / ".venv" / ".d2amp-venv", (4e9, 4e9))
    assert checkout("setup")[1] == [INSTALL, SETUP]
    moved = tmp_path / "moved"
    checkout.folder.rename(moved)
    os.utime(moved / ".venv" / ".d2amp-ready", (5e9, 5e9))
    assert checkout("setup", where=moved)[1] == [INSTALL, SETUP]  # the commands in .venv/bin name the old folder
    os.utime(moved / ".venv" / ".d2amp-ready", (5e9, 5e9))
    assert checkout("setup", where=moved)[1] == []
    (moved / ".venv" / "bin" / "python").unlink()  # the Python it was made from was removed
    assert checkout("setup", where=moved)[1] == [MAKE_VENV, INSTALL, SETUP]


def test_make_refuses_an_old_python(checkout):
    status, commands, output = checkout("demo", old="1")
    assert status != 0 and MAKE_VENV not in commands
    assert "needs Python 3.10 or newer" in output and "Python 3.8.20" in output
    assert "make demo PYTHON=python3.12" in output


def test_make_help_names_every_target(checkout):
    status, commands, output = checkout("help")
    assert status == 0 and commands == []
    for target in ("demo", "test", "soak", "bench", "setup", "clean"):
        assert f"make {target} " in output
