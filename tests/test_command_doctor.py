"""`d2amp doctor`: every verdict with the answers that other machines would give, text, JSON, exit statuses, no torch."""

import copy
import json
import os
import shlex
import subprocess
import sys
import types
import venv

import pytest
from conftest import ROOT

from d2amp_ext import __version__, _compat, cli
from d2amp_ext.doctor import devices, machine, packages, storage
from d2amp_ext.doctor.lines import BAD, NOTE, OK, Line, as_dict, describe, worst

GIB = 1 << 30


def there(name, version, **more):
    """The probe of a package that works."""
    found = {"found": True, "ok": True, "version": version, "file": f"/env/{name}/__init__.py", "error": None}
    return {**found, "missing": None, "owners": {name: version}, **more}


def absent(name):
    return {**there(name, None), "found": False, "ok": False, "file": None, "error": "it is not installed", "owners": {},
            "missing": name}  # fmt: skip


def broken(name, error, **more):
    return {**there(name, "1.0"), "ok": False, "error": error, **more}


WORKING = {
    "numpy": there("numpy", "2.4.0"),
    "PIL": there("pillow", "12.0.0"),
    "pkg_resources": there("setuptools", None, owners={"setuptools": "80.0"}),
    "cv2": there("cv2", "4.12.0", owners={"opencv-python-headless": "4.12.0.88"}),
    "torch": there("torch", "2.6.0+cu126", build="CUDA 12.6", owners={"torch": "2.6.0"}),
    "torchvision": there("torchvision", "0.21.0"),
    "detectron2": there("detectron2", "0.6", compiled_error=None, compiled_cuda=True, after_backward=True),
    "lightning": there("lightning", "2.6.1"),
}
GPU = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB, "error": None, "fp8": True, "capability": [9, 0],
       "native": ["bf16", "fp16", "tf32"], "emulated": []}  # fmt: skip
NO_GPU = {"available": False, "build": None, "why": None, "visible": None, "devices": [], "driver": False}
FACTS = {
    "cpu": {"model": "Some CPU", "allowed": 8, "native": ["bf16"], "emulated": ["fp16"]},
    "threads": {"default": 8, "load": 0.5, "seconds": {"1": 0.004, "8": 0.001}},
    "cudnn": {"version": 92400, "enabled": True},
    "mps": {"available": False, "native": [], "emulated": []},
    "xpu": {"available": False, "native": [], "emulated": []},
    "cuda": {**NO_GPU, "available": True, "build": "12.6", "devices": [GPU], "driver": True},
    "ended": None,
}


def package(name, **changed):
    """The line of a package when a probe says so."""
    lines = packages.package_lines({**WORKING, **changed})
    return next(line for line in lines if line.name == name)


def device(name, **changed):
    """The line of a device when torch says so."""
    return next((line for line in devices.device_lines({**FACTS, **changed}) if line.name == name), None)


# Lines


def test_lines_are_aligned_and_commands_stay_in_one_piece():
    command = "type " + "something long " * 20
    text = describe([Line("a", OK, "fine"), Line("longer name", BAD, "word " * 40 + "\nsecond", command), Line("b", NOTE, "n", "c")])
    rows = text.splitlines()
    assert rows[0] == "ok    a            fine" and rows[1].startswith("bad   longer name  word word")
    assert all(row.startswith(" " * 19) or row[:4] in ("ok  ", "note", "bad ") for row in rows[:-2])
    assert f"{'':19}second" in rows and f"{'':19}type: {command}" in rows and f"{'':19}to change it: c" in rows
    assert rows[-1] == "1 ok, 1 to note, 1 bad"
    assert all(len(row) <= 110 for row in rows if "type: " not in row)


def test_the_worst_verdict_counts():
    ok, note, bad = (Line("x", verdict, "") for verdict in (OK, NOTE, BAD))
    assert worst([]) == OK and worst([ok, note]) == NOTE and worst([note, bad, ok]) == BAD
    assert as_dict([note]) == {"verdict": NOTE, "checks": [{"name": "x", "verdict": NOTE, "text": "", "mend": None, "facts": {}}]}


# Packages


def test_nothing_is_wrong_with_what_works():
    assert {line.verdict for line in packages.package_lines(WORKING)} == {OK}
    assert {line.verdict for line in devices.device_lines(FACTS)} == {OK}


D2 = WORKING["detectron2"]
NO_C = "No module named 'detectron2._C'"


@pytest.mark.parametrize("name, changed, verdict, text, mend", [
    ("torch", {"torch": absent("torch")}, BAD, "is not installed", "d2amp setup"),
    ("torch", {"torch": broken("torch", "OSError: libcudart.so.12")}, BAD, "does not work: OSError: libcudart", "d2amp setup"),
    ("torch", {"torch": there("torch", "2.3.1", build="no CUDA")}, BAD, "older than 2.4", "--upgrade torch torchvision"),
    ("torchvision", {"torchvision": broken("torchvision", "RuntimeError: operator torchvision::nms does not exist")}, BAD,
     "nms does not exist", "--force-reinstall torch==2.6.0 torchvision"),
    ("torchvision", {"torchvision": absent("torchvision")}, BAD, "is not installed", "d2amp setup"),
    ("Lightning", {"lightning": absent("lightning")}, OK, "only `d2amp lightning` needs it", None),
    ("Lightning", {"lightning": there("lightning", "2.7.0")}, NOTE, "needs >= 2.4 and < 2.7", "d2amp-ext[lightning]"),
    ("Lightning", {"lightning": broken("lightning", "ImportError: x")}, BAD, "ImportError: x", "--upgrade"),
    ("numpy", {"numpy": absent("numpy")}, BAD, "is not installed", "pip install numpy"),
    ("Pillow", {"PIL": broken("pillow", "ImportError: _imaging")}, BAD, "_imaging", "pip install --force-reinstall Pillow"),
    ("OpenCV", {"cv2": broken("cv2", "ImportError: libGL.so.1")}, BAD, "libGL", "--force-reinstall opencv-python-headless"),
    ("OpenCV", {"cv2": absent("cv2"), "detectron2": absent("detectron2")}, BAD, "draws pictures", "d2amp setup"),
    ("pkg_resources", {"pkg_resources": absent("pkg_resources")}, BAD, "setuptools 82 removed it", '"setuptools<81"'),
    ("pkg_resources", {}, OK, "of setuptools 80.0", None),
    ("Detectron2", {"detectron2": absent("detectron2")}, BAD, "is not installed", "d2amp setup"),
    ("Detectron2", {"detectron2": broken("detectron2", "module 'PIL.Image' has no attribute 'LINEAR'")}, BAD, "LINEAR",
     'pip install "pillow<10"'),
    ("Detectron2", {"detectron2": broken("detectron2", "No module named 'fvcore'", missing="fvcore")}, BAD, "fvcore",
     "pip install fvcore"),
    ("Detectron2", {"detectron2": broken("detectron2", "SyntaxError: x")}, BAD, "SyntaxError",
     "uninstall -y detectron2 && d2amp setup"),
    ("Detectron2", {}, OK, "0.6, the official one", None),
    ("Detectron2", {"detectron2": {**D2, "after_backward": False}}, NOTE, "an old 0.6", "--source official"),
    ("Detectron2", {"detectron2": {**D2, "version": "0.7.2", "owners": {"sal-detectron2": "0.7.2"}}}, OK, "sal-detectron2", None),
    ("compiled ops", {}, OK, "with CUDA", None),
    ("compiled ops", {"detectron2": {**D2, "compiled_error": NO_C}}, NOTE, "rotated boxes and deformable convolution are missing",
     "uninstall -y detectron2 && d2amp setup --source official"),
    ("compiled ops", {"detectron2": {**D2, "compiled_error": NO_C, "owners": {}}}, NOTE, "all else trains", "/env/detectron2 is off"),
    ("compiled ops", {"detectron2": {**D2, "compiled_error": "_C.so: undefined symbol: _ZN3c10"}}, BAD, "another torch",
     "--no-build-isolation git+https://github.com/facebookresearch/detectron2"),
])  # fmt: skip
def test_packages(name, changed, verdict, text, mend):
    line = package(name, **changed)
    assert line.verdict == verdict and text in line.text
    assert line.mend is None if mend is None else mend in line.mend


def test_the_set_up_mends_all_that_it_brings():
    lines = packages.package_lines({name: absent(name) for name in WORKING})
    assert {line.mend for line in lines if line.verdict == BAD} == {"d2amp setup"}
    assert [line.name for line in lines if line.verdict == OK] == ["Python", "Lightning"]


def test_which_detectron2_it_is(tmp_path):
    (tmp_path / "detectron2").mkdir()
    found = {**D2, "file": str(tmp_path / "detectron2" / "__init__.py")}
    info = tmp_path / "detectron2-0.6.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"vcs_info": {"commit_id": "02b5c4e295e990042a714712c21dc79b731e8833"}}))
    assert packages.which_detectron2(found) == "the official one at commit 02b5c4e2"
    assert packages.which_detectron2({**found, "after_backward": False}) == "an old 0.6"
    sal = tmp_path / "sal_detectron2-0.7.2.dist-info"
    sal.mkdir()
    (sal / packages.NOTE_NAME).touch()
    assert packages.which_detectron2({**found, "owners": {"sal-detectron2": "0.7.2"}}) == "sal-detectron2 as pure Python"
    assert packages.which_detectron2({**D2, "owners": {}}) == "the official one, not installed by pip"


def test_a_package_that_crashes_hides_none_behind_it():
    def look(names):
        seen = {name: there(name, "1") for name in names}
        if "b" in names:
            at = names.index("b")
            seen["b"] = broken("b", "the interpreter crashed or hung while importing it")
            seen.update((name, {**absent(name), "error": packages.SKIPPED}) for name in names[at + 1 :])
        return seen

    seen = packages.see("abcd", look)
    assert list(seen) == list("abcd") and [found["ok"] for found in seen.values()] == [True, False, True, True]


def test_what_an_installer_was_stopped_in(monkeypatch):
    monkeypatch.setattr(packages, "incomplete_distributions", lambda: {ROOT / "x.dist-info": ("fvcore", "0.1")})
    line = package("fvcore")
    assert line.verdict == BAD and line.mend.endswith("pip install --force-reinstall --no-deps fvcore==0.1")


# Devices


CUDA = FACTS["cuda"]
THREADS = {"default": 64, "load": 1.0, "seconds": {"1": 0.004, "4": 0.001, "64": 0.009}}


@pytest.mark.parametrize("name, changed, verdict, text, mend", [
    ("CPU", {}, OK, "Some CPU, 8 to use; native: bf16; emulated and slow: fp16; not: fp8, tf32", None),
    ("GPU 0", {}, OK, "NVIDIA H100, 80 GiB, compute capability 9.0; native: fp16, bf16, fp8, tf32", None),
    ("GPU 0", {"cuda": {**CUDA, "devices": [{**GPU, "native": [], "fp8": False, "emulated": ["fp16"]}]}}, NOTE, "fp32 only", None),
    ("GPU 0", {"cuda": {**CUDA, "devices": [{**GPU, "error": "no kernel image is available"}]}}, BAD, "no kernel image",
     "--force-reinstall torch torchvision"),
    ("GPU", {"cuda": NO_GPU}, NOTE, "MODEL.DEVICE cpu", None),
    ("GPU", {"cuda": {**NO_GPU, "driver": True}}, BAD, "built without CUDA", "--force-reinstall torch torchvision"),
    ("GPU", {"cuda": {**NO_GPU, "driver": True, "build": "13.0", "visible": ""}}, NOTE, "hidden", "unset CUDA_VISIBLE_DEVICES"),
    ("GPU", {"cuda": {**NO_GPU, "driver": True, "build": "13.0", "visible": "-1"}}, NOTE, "hidden", "unset CUDA_VISIBLE_DEVICES"),
    ("GPU", {"cuda": {**NO_GPU, "driver": True, "build": "13.0", "why": "driver is too old"}}, BAD, "too old", "nvidia-smi"),
    ("MPS", {"cuda": NO_GPU, "mps": {"available": True, "native": ["fp16"], "emulated": ["bf16"]}}, OK, "native: fp16", None),
    ("cuDNN", {}, OK, "92400", None),
    ("cuDNN", {"cudnn": {"version": None, "enabled": True}}, BAD, "does not load", "--force-reinstall"),
    ("cuDNN", {"cudnn": {"version": None, "enabled": True}, "cuda": NO_GPU}, OK, "not needed", None),
    ("threads", {}, OK, "8 by default; 4.00 ms with 1, 1.00 ms with 8", None),
    ("threads", {"threads": THREADS}, BAD, "64 threads take 9.0 times as long as 4", "OMP_NUM_THREADS=4"),
    ("threads", {"threads": {**THREADS, "load": 20.0}}, NOTE, "other processes keep the CPUs busy (load 20.0)", "OMP_NUM_THREADS=4"),
    ("threads", {"threads": {"default": 16, "load": 0.5, "seconds": {"1": 0.004, "16": 0.001}}}, NOTE, "more threads than the 8 CPUs",
     "OMP_NUM_THREADS=8"),
    ("threads", {"threads": {"error": "RuntimeError: x"}}, NOTE, "RuntimeError: x", None),
])  # fmt: skip
def test_devices(name, changed, verdict, text, mend):
    line = device(name, **changed)
    assert line.verdict == verdict and text in line.text
    assert line.mend is None if mend is None else mend in line.mend


def test_no_line_about_a_missing_gpu_where_there_is_another():
    assert device("GPU", cuda=NO_GPU, mps={"available": True, "native": ["fp16"], "emulated": []}) is None


def test_a_driver_that_hangs_torch_is_a_line():
    facts = {name: FACTS[name] for name in FACTS if name != "cuda"}
    lines = devices.device_lines({**facts, "ended": "no answer within 120 s"})
    assert [line.name for line in lines if line.verdict == BAD] == ["devices"]
    assert "asked about cuda, and no answer within 120 s" in lines[-1].text and lines[-1].mend == "nvidia-smi"
    assert {"CPU", "threads"} <= {line.name for line in lines}


def test_a_compiled_module_for_the_cpu_is_bad_on_a_gpu_only():
    seen = {**WORKING, "detectron2": {**D2, "compiled_cuda": False}}
    line = packages.compiled_without_cuda(seen, FACTS)
    assert line.verdict == BAD and line.mend.startswith("FORCE_CUDA=1 ")
    assert packages.compiled_without_cuda(seen, {**FACTS, "cuda": NO_GPU}) is None
    assert packages.compiled_without_cuda(WORKING, FACTS) is None


@pytest.mark.parametrize("capability, fp8", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_fp8(monkeypatch, capability, fp8):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert _compat.has_fp8(0) is fp8
    monkeypatch.setattr(torch.version, "hip", "6.2")
    for name, has in (("gfx942:sramecc+", True), ("gfx90a", False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(gcnArchName=name))  # noqa: B023
        assert _compat.has_fp8(0) is has


# The process that asks torch


def test_threads_are_measured_within_a_second_and_put_back():
    import time

    import torch

    before = torch.get_num_threads()
    start = time.perf_counter()
    best = machine.measure_threads([1, 2], seconds=0.1)
    assert time.perf_counter() - start < 1 and 3 * machine.MEASURE_SECONDS < 1
    assert list(best) == ["1", "2"] and all(0 < value < 1 for value in best.values())
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("quota, most", [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", None)])
def test_cpus_that_a_container_may_use(tmp_path, monkeypatch, quota, most):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.allowed_cpus(tmp_path / "cpu.max") == (most or 8)
    assert machine.allowed_cpus(tmp_path / "none") == 8


@pytest.mark.parametrize("ending, said", [
    ("import os; os.abort()", "the process ended with status -6"),
    ("raise SystemExit('no luck')", "the process ended with status 1: no luck"),
    ("import time; time.sleep(60)", "no answer within 1 s"),
])  # fmt: skip
def test_what_is_known_before_a_crash_or_a_hang_stays(ending, said):
    write = "import sys; out = open(sys.argv[1], 'a'); out.write('[\"cpu\", {\"allowed\": 2}]\\n'); out.flush()\n"
    facts = machine.ask(timeout=1 if "sleep" in ending else 30, source=write + ending)
    assert facts["cpu"] == {"allowed": 2} and facts["ended"].startswith(said) and "cuda" not in facts


def test_an_exception_in_one_part_hides_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PARTS", ("cudnn", "cpu"))
    monkeypatch.setattr(machine, "cudnn", lambda: 1 / 0)
    machine.write_facts(tmp_path / "facts")
    facts = dict(json.loads(line) for line in (tmp_path / "facts").read_text().splitlines())
    assert facts["cudnn"] == {"error": "ZeroDivisionError: division by zero"} and facts["cpu"]["allowed"] >= 1


# Disk and shared memory


@pytest.mark.parametrize("free, total, disk, shared, mend", [
    (GIB // 100, GIB // 16, BAD, BAD, "mount -o remount"),
    (GIB // 2, GIB // 2, BAD, NOTE, "mount -o remount"),
    (GIB // 2, 8 * GIB, BAD, NOTE, "ls -l"),
    (10 * GIB, 16 * GIB, NOTE, OK, None),
    (100 * GIB, 500 * GIB, OK, OK, None),
])  # fmt: skip
def test_room(tmp_path, monkeypatch, free, total, disk, shared, mend):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free, total=total))
    monkeypatch.setattr(storage.os.path, "exists", lambda path: False)
    lines = storage.storage_lines(str(tmp_path), str(tmp_path))
    assert [line.verdict for line in lines] == [disk, shared]
    assert (lines[0].mend is None) == (disk == OK)
    assert lines[1].mend is None if mend is None else mend in lines[1].mend


def test_small_shared_memory_in_a_container_and_none_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1 << 26, total=1 << 26))
    monkeypatch.setattr(storage.os.path, "exists", lambda path: path == "/.dockerenv")
    line = storage.shared_line(str(tmp_path))
    assert line.verdict == BAD and line.mend.startswith("docker run --shm-size") and "64 MiB" in line.text
    assert storage.shared_line(str(tmp_path / "none")).verdict == OK


def test_a_folder_that_cannot_be_used(tmp_path, monkeypatch):
    assert storage.disk_line(tmp_path / "none").verdict == BAD
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    line = storage.disk_line(tmp_path)
    assert line.verdict == BAD and "cannot be written to" in line.text and line.mend


# The command


@pytest.fixture
def pretend(monkeypatch):
    """Sets what the packages and the machine say; both may be changed afterwards."""
    seen, facts = copy.deepcopy(WORKING), copy.deepcopy(FACTS)
    room = [Line("disk", OK, "enough")]
    monkeypatch.setattr(packages, "see", lambda: seen)
    monkeypatch.setattr(machine, "ask", lambda: facts)
    monkeypatch.setattr(storage, "storage_lines", lambda: room)
    monkeypatch.setattr(packages, "incomplete_distributions", dict)
    return seen, facts


def test_text_and_status(pretend, capsys):
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["ok", "d2amp-ext", __version__] and "Looking at packages" in err
    assert out.endswith("ok, 0 to note, 0 bad\n")
    pretend[0]["detectron2"]["compiled_cuda"] = False  # on a machine with a GPU
    assert cli.main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert out.count("compiled ops") == 1 and "type: FORCE_CUDA=1" in out and out.endswith("0 to note, 1 bad\n")


def test_a_note_is_status_0(pretend, capsys):
    pretend[0]["detectron2"]["compiled_error"] = NO_C
    assert cli.main(["doctor"]) == 0
    assert "1 to note, 0 bad" in capsys.readouterr().out


def test_json_is_one_object_and_nothing_else(pretend, capsys):
    pretend[0]["pkg_resources"] = absent("pkg_resources")
    assert cli.main(["doctor", "--json"]) == 3
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == "" and answer["verdict"] == BAD
    bad = [check for check in answer["checks"] if check["verdict"] == BAD]
    assert [check["name"] for check in bad] == ["pkg_resources"] and shlex.split(bad[0]["mend"])[-1] == "setuptools<81"
    assert next(check for check in answer["checks"] if check["name"] == "GPU 0")["facts"]["capability"] == [9, 0]


def test_a_torch_that_is_broken_is_not_asked_anything(pretend, monkeypatch, capsys):
    pretend[0]["torch"] = broken("torch", "the interpreter crashed or hung while importing it")
    monkeypatch.setattr(machine, "ask", lambda: pytest.fail("asked"))
    assert cli.main(["doctor"]) == 3
    assert "not looked at" in capsys.readouterr().out


def doctor(python, **environment):
    done = subprocess.run([python, "-m", "d2amp_ext.cli", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, timeout=120)  # fmt: skip
    assert done.returncode == 3, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_in_an_environment_without_anything(tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    checks = doctor(str(folder / "python"))
    assert checks["torch"]["mend"] == checks["Detectron2"]["mend"] == "d2amp setup"
    assert checks["torch"]["text"] == "is not installed" and checks["disk"]["verdict"] in (OK, NOTE, BAD)


def test_with_packages_that_crash_or_raise(tmp_path):
    """Real ones on the path: torch ends the interpreter, numpy raises; no traceback, and the rest is seen."""
    venv.create(tmp_path / "env", with_pip=False)
    for name, source in (("torch", "import os; os.abort()"), ("numpy", "raise OSError('libblas.so.3')"), ("PIL", "__version__ = '9.5'")):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / "__init__.py").write_text(source)
    folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    checks = doctor(str(folder / "python"), PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path / "lib")]))
    assert "crashed or hung" in checks["torch"]["text"] and "libblas.so.3" in checks["numpy"]["text"]
    assert checks["Pillow"]["verdict"] == OK and checks["torchvision"]["text"] == "is not installed"


def test_this_machine_as_torch_sees_it():
    facts = machine.ask(sys.executable)
    assert facts["ended"] is None and facts.keys() == {*machine.PARTS, "ended"}
    assert set(facts["cpu"]["native"]) == _compat.native_precisions("cpu")[0]
    assert {"CPU", "threads", "cuDNN"} <= {line.name for line in devices.device_lines(facts)}


def test_help_has_an_example(capsys):
    assert cli.main(["doctor", "--help"]) == 0
    assert "d2amp doctor --json > doctor.json" in capsys.readouterr().out
