"""Losses on their way from the device to Detectron2's EventStorage: many steps, one transfer."""

import math

import numpy as np
import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage

from . import _compat


class MetricBuffer:
    """Keeps the losses of steps as device tensors until `flush` writes them all, each under its own iteration.

    A loss that is not finite, which only a skipped step has, is not written.
    """

    def __init__(self):
        self._steps = []

    def add(self, record, data_time, scalars=None):
        """Adds a step.

        Args:
            record (StepRecord):
            data_time (float): seconds that this rank waited for data.
            scalars (dict[str, Tensor] or None): further device scalars to write as they are.
        """
        self._steps.append((record.iteration, record.losses, data_time, scalars or {}))

    def flush(self, gather=True):
        """Reads everything in one transfer and writes it to the current EventStorage.

        Args:
            gather (bool): average over ranks, as Detectron2 does; every rank must call it. False: this rank's values,
                for a run that is ending by an error.
        """
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        rows = _read(steps)
        storage = get_event_storage()
        for (iteration, _, data_time, _), _row in zip(steps, rows):
            _compat.put_scalar(storage, "rank_data_time", data_time, iteration)
        ranks = comm.gather(rows) if gather else [rows]
        if gather and not comm.is_main_process():
            return
        for step, same_step in zip(steps, zip(*ranks)):
            _write(storage, step[0], same_step)


def _read(steps):
    """One dict of floats per step: its losses under their names, "data_time", and other scalars."""
    tensors = [value for _, losses, _, scalars in steps for value in (*losses.values(), *scalars.values())]
    values = iter(torch.stack([t.float() for t in tensors]).tolist() if tensors else [])
    rows = []
    for _, losses, data_time, scalars in steps:
        row = {"losses": {name: next(values) for name in losses}, "data_time": data_time}
        rows.append({**row, "scalars": {name: next(values) for name in scalars}})
    return rows


def _write(storage, iteration, ranks):
    # The slowest rank's data time is the one that everybody waits for.
    _compat.put_scalar(storage, "data_time", max(row["data_time"] for row in ranks), iteration)
    losses = {name: np.mean([row["losses"].get(name, math.nan) for row in ranks]) for name in ranks[0]["losses"]}
    total = sum(losses.values())
    if losses and math.isfinite(total):
        _compat.put_scalar(storage, "total_loss", total, iteration)
    scalars = dict(ranks[0]["scalars"])
    if len(losses) > 1:
        scalars.update((name, value) for name, value in losses.items() if math.isfinite(value))
    for name, value in scalars.items():
        _compat.put_scalar(storage, name, value, iteration)
