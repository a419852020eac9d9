"""How much memory the run takes."""

import os
import sys

import torch
from detectron2.engine import HookBase

GIB = 2**30


class MemoryScalars(HookBase):
    """Memory of the GPU as torch counts it; on other devices that of this process on the host."""

    def __init__(self, readout, device):
        """
        Args:
            readout (Readout):
            device (torch.device): of the model.
        """
        self._readout = readout
        self._device = device

    def after_step(self):
        if self._readout.is_due(self.trainer):
            scalars = cuda_memory(self._device) if self._device.type == "cuda" else host_memory()
            self._readout.add([], lambda _: scalars)


def cuda_memory(device):
    """Peak since the start of the run; Detectron2's console shows the same peak, so it is never reset here."""
    return {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "memory/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        "memory/oom_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def host_memory():
    """Resident memory of this process: now, where /proc tells, else its peak. Empty where neither is known."""
    try:
        with open("/proc/self/statm") as file:
            return {"memory/host_rss_gib": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB}
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/host_peak_rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
