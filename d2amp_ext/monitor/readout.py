"""One transfer a period: what the hooks of the monitor want to know of a step is read together and written."""

import math
import time

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from .names import SCALARS, WORST, base_of


class Readout:
    """Collects what is to be read in a step that is due. In other steps nothing is computed and nothing waits.

    Attributes:
        period (int): iterations between two readings.
        seconds (float): how long the last reading took.
    """

    def __init__(self, period):
        assert period > 0, period
        self.period = period
        self.seconds = 0.0
        self._parts = []

    def is_due(self, trainer):
        """Whether the step that `trainer` is in is read: every `period` iterations and at the end."""
        done = trainer.iter + 1
        return done % self.period == 0 or done == getattr(trainer, "max_iter", None)

    def add(self, tensors, finish):
        """Adds something to the reading of this step.

        Args:
            tensors (list[Tensor]): of any shape and float dtype, on any device. Few: each costs some operators.
            finish (callable): takes their values, one flat list of floats, and returns scalars by name.
        """
        self._parts.append((tensors, finish))

    @torch.no_grad()
    def read(self):
        """Reads everything that was added, in one transfer.

        Returns:
            dict[str, float]: finite values only. A name that comes twice keeps its first value.
        """
        start = time.perf_counter()
        parts, self._parts = self._parts, []
        tensors = [tensor.float().reshape(-1) for part, _ in parts for tensor in part]
        values = []
        if tensors:
            device = tensors[0].device
            values = torch.cat([t if t.device == device else t.to(device) for t in tensors]).tolist()
        scalars, position = {}, 0
        for part, finish in parts:
            count = sum(tensor.numel() for tensor in part)
            for name, value in finish(values[position : position + count]).items():
                if math.isfinite(value):
                    scalars.setdefault(name, float(value))
            position += count
        self.seconds = time.perf_counter() - start
        return scalars


class WriteReadout(HookBase):
    """Reads when due and writes to the EventStorage of the main rank. Goes behind the hooks that add to the reading."""

    def __init__(self, readout):
        self._readout = readout

    def after_step(self):
        if not self._readout.is_due(self.trainer):
            return
        ranks = comm.gather(self._readout.read())
        if comm.is_main_process():
            for name, value in over_ranks(ranks).items():
                self.trainer.storage.put_scalar(name, value, smoothing_hint=False)


def over_ranks(ranks):
    """The scalars of one rank as they are; of several, their mean, and the worst under `<name>_worst`.

    Args:
        ranks (list[dict[str, float]]): a rank may lack a name, when the value was not finite there.

    Returns:
        dict[str, float]
    """
    if len(ranks) == 1:
        return ranks[0]
    scalars = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank[name] for rank in ranks if name in rank]
        scalars[name] = sum(values) / len(values)
        base = base_of(name)
        scalars[base + WORST + name[len(base) :]] = SCALARS[base](values)
    return scalars
