"""Asks torch about this machine, in a process of its own: a broken driver may crash or hang whoever asks."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .. import _compat

SECONDS = 120  # for the process; the first use of a GPU may take long
PARTS = ("cpu", "threads", "cudnn", "mps", "xpu", "cuda")  # functions of this module, those that may hang last
MEASURE_SECONDS = 0.2  # for each number of threads
WARM_UP = 5  # calls
ROOT = str(Path(__file__).resolve().parent.parent.parent)
# The folder of the caller is taken off the path, as in the set-up's probe.
_SOURCE = "import sys; del sys.path[0]; sys.path.append(sys.argv[2])\n" \
    "from d2amp_ext.doctor.machine import write_facts; write_facts(sys.argv[1])"  # fmt: skip


def ask(python=sys.executable, timeout=SECONDS, source=_SOURCE):
    """Asks in a new process.

    Args:
        python: the interpreter; it must import torch.
        timeout: seconds.
        source: what it runs.

    Returns:
        dict: `cpu`, `threads`, `cudnn`, `cuda`, `xpu`, `mps` -> see the functions of this module of these names, as
        far as they came; an exception is {"error": str}. `ended` (str) says why the rest is missing, or is None.
    """
    with tempfile.TemporaryDirectory(prefix="d2amp-doctor-") as folder:
        report = Path(folder) / "facts"
        report.touch()
        command, ended = [python, "-c", source, str(report), ROOT], None
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  timeout=timeout)  # fmt: skip
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                ended = f"the process ended with status {done.returncode}: {' '.join(said)}".rstrip(": ")
        except subprocess.TimeoutExpired:
            ended = f"no answer within {timeout:g} s"
        facts = dict(json.loads(line) for line in report.read_text(encoding="utf-8").splitlines())
    return {**facts, "ended": ended}


def write_facts(path):
    """Appends one JSON line a part, each as soon as it is known."""
    with open(path, "a", encoding="utf-8") as out:
        for part in PARTS:
            try:
                facts = globals()[part]()
            except Exception as error:
                facts = {"error": f"{type(error).__name__}: {error}"[:1000]}
            out.write(json.dumps([part, facts]) + "\n")
            out.flush()


def cpu_model():
    """The processor's name."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((row.split(":", 1)[1].strip() for row in rows if row.startswith("model name")), model)
    return model


def cpu():
    """`model` (str), `allowed` CPUs, and what `_precisions` says."""
    return {"model": cpu_model(), "allowed": allowed_cpus(), **_precisions("cpu")}


def allowed_cpus(quota_file="/sys/fs/cgroup/cpu.max"):
    """How many CPUs this process may use: affinity and the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path(quota_file).read_text(encoding="utf-8").split()[:2]
        count = min(count, max(1, -(-int(quota) // int(period))))  # "max" is no number: no quota
    return count


def threads():
    """`default` number, `load` of the last minute, and `seconds`: number (str) -> of a small convolution and a product."""
    import torch

    default = torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {"default": default, "load": load, "seconds": measure_threads(sorted({1, default, min(default, allowed_cpus())}))}


def measure_threads(counts, seconds=MEASURE_SECONDS):
    """Seconds a call for each number of threads, on the average: waiting for a CPU that others use counts, too.

    One number after the other, for calls right after a change of it are many times slower.
    """
    import torch
    from torch.nn.functional import conv2d

    image, kernel, matrix = torch.randn(1, 32, 64, 64), torch.randn(32, 32, 3, 3), torch.randn(256, 256)
    before, mean = torch.get_num_threads(), {}
    try:
        with torch.no_grad():
            for count in counts:
                torch.set_num_threads(count)
                for _ in range(WARM_UP):
                    conv2d(image, kernel, padding=1) + (matrix @ matrix).sum()
                calls, start = 0, time.perf_counter()
                while (now := time.perf_counter()) < start + seconds or not calls:
                    conv2d(image, kernel, padding=1)
                    matrix @ matrix
                    calls += 1
                mean[str(count)] = (now - start) / calls
    finally:
        torch.set_num_threads(before)
    return mean


def cudnn():
    """`version` (int or None) and whether it is `enabled`."""
    import torch

    available = torch.backends.cudnn.is_available()
    return {"version": torch.backends.cudnn.version() if available else None, "enabled": torch.backends.cudnn.enabled}


def cuda():
    """`available`, `build` (what torch was built for, or None), `visible` (the variable), `why` not, and `devices`."""
    import torch

    facts = {"available": torch.cuda.is_available(), "build": torch.version.cuda or torch.version.hip, "why": None,
             "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "devices": [], "driver": has_nvidia_driver()}  # fmt: skip
    if facts["build"] and not facts["available"]:
        try:
            torch.zeros(1, device="cuda")
        except Exception as error:
            facts["why"] = str(error).strip().split("\n")[0][:300]
    for index in range(torch.cuda.device_count() if facts["available"] else 0):
        facts["devices"].append(_gpu(index))
    return facts


def _gpu(index):
    import torch

    properties = torch.cuda.get_device_properties(index)
    facts = {"name": properties.name, "memory_bytes": properties.total_memory, "error": None, "fp8": _compat.has_fp8(index),
             "capability": list(torch.cuda.get_device_capability(index)), **_precisions("cuda", index)}  # fmt: skip
    try:  # a torch without code for this GPU fails here only
        torch.ones(8, 8, device=f"cuda:{index}").mm(torch.ones(8, 8, device=f"cuda:{index}")).sum().item()
    except Exception as error:
        facts["error"] = str(error).strip().split("\n")[0][:300]
    return facts


def xpu():
    """Whether one is `available`, and its precisions."""
    import torch

    return {"available": hasattr(torch, "xpu") and torch.xpu.is_available(), **_precisions("xpu")}


def mps():
    """Whether it is `available`, and its precisions."""
    import torch

    return {"available": torch.backends.mps.is_available(), **_precisions("mps")}


def _precisions(device_type, index=None):
    """`native` and `emulated`: lists of names."""
    native, runnable = _compat.native_precisions(device_type, index)
    return {"native": sorted(native), "emulated": sorted(runnable - native)}


def has_nvidia_driver():
    """Whether this machine has NVIDIA's driver, whatever torch says."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")
