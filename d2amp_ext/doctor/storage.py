"""Room on the disk of the working folder, and the shared memory through which loader workers hand on batches."""

import os
import shutil

from .lines import BAD, NOTE, OK, Line

GIB = 1 << 30
DISK_BAD, DISK_NOTE = 2 * GIB, 20 * GIB  # a checkpoint of a ResNet-50 detector with its optimizer takes 0.33 GiB
# Four workers, two batches ahead of each, 16 images of 800 x 1333 in 8 bit: 0.4 GiB. Containers start with 64 MiB.
SHARED_BAD, SHARED_NOTE = GIB // 4, GIB
SHARED = "/dev/shm"


def storage_lines(folder=".", shared=SHARED):
    """Looks at both.

    Args:
        folder: where runs write their output.
        shared: where this system has shared memory; it may not exist.

    Returns:
        list[Line]:
    """
    return [disk_line(folder), shared_line(shared)]


def disk_line(folder):
    """Whether runs can write here, and how much."""
    folder = os.path.abspath(folder)
    elsewhere = "d2amp train ... OUTPUT_DIR /a/folder/on/a/larger/disk"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Line("disk", BAD, f"{folder} cannot be looked at: {error.strerror}", elsewhere)
    facts = {"folder": folder, "free_bytes": usage.free, "total_bytes": usage.total, "writable": os.access(folder, os.W_OK)}
    text = f"{_size(usage.free)} of {_size(usage.total)} free in {folder}"
    if not facts["writable"]:
        return Line("disk", BAD, f"{folder} cannot be written to", "d2amp train ... OUTPUT_DIR /a/folder/of/your/own", facts)
    if usage.free < DISK_BAD:
        return Line("disk", BAD, f"{text}: full after a few checkpoints", elsewhere, facts)
    if usage.free < DISK_NOTE:
        keep = "d2amp train ... SOLVER.CHECKPOINT_KEEP 3"
        return Line("disk", NOTE, f"{text}: enough for tens of checkpoints only", keep, facts)
    return Line("disk", OK, text, facts=facts)


def shared_line(shared):
    """Whether loader workers have the shared memory that they need."""
    if not os.path.isdir(shared):
        return Line("shared memory", OK, f"no {shared} on this system: loader workers do without")
    usage = shutil.disk_usage(shared)
    facts = {"folder": shared, "free_bytes": usage.free, "total_bytes": usage.total}
    text = f"{_size(usage.free)} of {_size(usage.total)} free in {shared}"
    if usage.free >= SHARED_NOTE:
        return Line("shared memory", OK, text, facts=facts)
    if os.path.exists("/.dockerenv"):
        mend = "docker run --shm-size=8g ..."
    elif usage.total >= SHARED_NOTE:  # large, but in use
        mend = f"ls -l {shared}     (files there that stopped processes left may be removed)"
    else:
        mend = f"sudo mount -o remount,size=8G {shared}"
    text += ": loader workers hand on batches through it; without room they die of a bus error. DATALOADER.NUM_WORKERS 0 " \
        "does without"  # fmt: skip
    return Line("shared memory", BAD if usage.free < SHARED_BAD else NOTE, text, mend, facts)


def _size(count):
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
