"""What to think of devices, their precisions, cuDNN and threads: judges what `machine.ask` found."""

import os

from ..installer.steps import PIP
from .lines import BAD, NOTE, OK, Line
from .machine import PARTS

REINSTALL_TORCH = f"{PIP} install --force-reinstall torch torchvision"
SLOWER = 1.25  # a default number of threads that takes this many times as long as another one is bad
ALL = ("fp16", "bf16", "fp8", "tf32")


def device_lines(facts):
    """Judges the answer of `machine.ask`.

    Returns:
        list[Line]: CPU, every GPU, cuDNN and threads.
    """
    told = {"cpu": _cpu, "threads": _threads, "mps": _other, "xpu": _other, "cuda": _cuda, "cudnn": _cudnn}
    lines = []
    for part, judge in told.items():
        found = facts.get(part)
        if found is None:
            continue
        if "error" in found:
            lines.append(Line(part, NOTE, f"torch could not say: {found['error']}", facts=found))
        else:
            lines += judge(part, found, facts)
    missing = next((part for part in PARTS if part not in facts), None)
    if missing:  # those behind it were not asked
        text = f"torch was asked about {missing}, and {facts['ended'] or 'gave no answer'}"
        lines.append(Line("devices", BAD, text, "nvidia-smi" if missing == "cuda" else REINSTALL_TORCH, {"missing": missing}))
    return lines


def _cpu(part, found, facts):
    text = f"{found['model']}, {found['allowed']} to use; {_precisions(found)}"
    return [Line("CPU", OK, text, facts=found)]


def _threads(part, found, facts):
    default, seconds = found["default"], {int(count): value for count, value in found["seconds"].items()}
    best = min(seconds, key=lambda count: (seconds[count], count))
    text = f"{default} by default; " + ", ".join(
        f"{value * 1e3:.2f} ms with {count}" for count, value in seconds.items()) + " (convolution and matrix product)"  # fmt: skip
    variable = os.environ.get("OMP_NUM_THREADS")
    if variable:
        text += f"; OMP_NUM_THREADS={variable}"
    word = "set" if os.name == "nt" else "export"
    if seconds[default] > SLOWER * seconds[best]:
        text += f"\n{default} threads take {seconds[default] / seconds[best]:.1f} times as long as {best}"
        busy = found["load"] > (facts.get("cpu") or {}).get("allowed", default) + 1  # 1: this measurement and its like
        if busy:
            text += f", but other processes keep the CPUs busy (load {found['load']:.1f}): look again when they are done"
        return [Line("threads", NOTE if busy else BAD, text, f"{word} OMP_NUM_THREADS={best}", found)]
    allowed = (facts.get("cpu") or {}).get("allowed", default)
    if default > allowed:
        text += f"\nmore threads than the {allowed} CPUs that this process may use"
        return [Line("threads", NOTE, text, f"{word} OMP_NUM_THREADS={allowed}", found)]
    return [Line("threads", OK, text, facts=found)]


def _other(part, found, facts):
    """Apple's and Intel's GPUs, where there is one."""
    return [Line(part.upper(), OK, _precisions(found), facts=found)] if found["available"] else []


def _cuda(part, found, facts):
    if found["available"]:
        return [_gpu(index, gpu) for index, gpu in enumerate(found["devices"])]
    others = [name for name in ("mps", "xpu") if (facts.get(name) or {}).get("available")]
    if not found["driver"] and not (found["build"] and os.path.exists("/dev/kfd")):
        text = "none that torch can use: runs go to the CPU (MODEL.DEVICE cpu)"
        return [] if others else [Line("GPU", NOTE, text, facts=found)]
    if not found["build"]:
        text = "there is an NVIDIA driver, but this torch was built without CUDA"
        return [Line("GPU", BAD, text, REINSTALL_TORCH, found)]
    if found["visible"] is not None and not found["visible"].split(",")[0].strip().isdigit():
        text = f"hidden by CUDA_VISIBLE_DEVICES={found['visible']!r}"
        return [Line("GPU", NOTE, text, "unset CUDA_VISIBLE_DEVICES", found)]
    text = f"there is a driver, but torch cannot use it: {found['why'] or 'it names no reason'}\n" \
        "A driver that is older than torch's CUDA needs an update, or torch a build for an older CUDA"  # fmt: skip
    return [Line("GPU", BAD, text, "nvidia-smi     (shows the driver and the newest CUDA that it allows)", found)]


def _gpu(index, gpu):
    name = f"GPU {index}"
    capability = ".".join(map(str, gpu["capability"]))
    about = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, compute capability {capability}"
    if gpu["error"]:
        return Line(name, BAD, f"{about}\na matrix product fails on it: {gpu['error']}", REINSTALL_TORCH, gpu)
    text = f"{about}; {_precisions(gpu)}"
    return Line(name, OK if {"fp16", "bf16"} & set(gpu["native"]) else NOTE, text, facts=gpu)


def _cudnn(part, found, facts):
    has_gpu = bool((facts.get("cuda") or {}).get("devices"))
    if found["version"] and found["enabled"]:
        return [Line("cuDNN", OK, str(found["version"]), facts=found)]
    if not has_gpu:
        return [Line("cuDNN", OK, "not needed without a GPU", facts=found)]
    why = "is switched off" if found["version"] else "does not load"
    return [Line("cuDNN", BAD, f"{why}: convolutions on the GPU are many times slower", REINSTALL_TORCH, found)]


def _precisions(found):
    """What a device does in hardware, what it emulates, and what neither."""
    native = [*found["native"], *(["fp8"] if found.get("fp8") else [])]
    native = [name for name in ALL if name in native]
    parts = [f"native: {', '.join(native) or 'fp32 only'}"]
    if found["emulated"]:
        parts.append(f"emulated and slow: {', '.join(found['emulated'])}")
    missing = [name for name in ALL if name not in native and name not in found["emulated"]]
    return "; ".join([*parts, *([f"not: {', '.join(missing)}"] if missing else [])])

