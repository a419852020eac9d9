"""What a StepRecord says, as scalars."""

from collections import deque

from detectron2.engine import HookBase

WINDOW = 1000  # updates over which the rate of skips is taken


class StepScalars(HookBase):
    """Gradient scale, skips and the norm of all gradients. Without AMP there is no record, and nothing is written."""

    def __init__(self, readout):
        self._readout = readout
        self._recent = deque(maxlen=WINDOW)

    def after_step(self):
        record = getattr(self.trainer, "last_step", None)
        if record is None:
            return
        self._recent.append(bool(record.skipped))
        if not self._readout.is_due(self.trainer):
            return
        names = ["precision/grad_scale", "precision/grad_norm"]
        tensors = {name: t for name, t in zip(names, (record.scale, record.grad_norm)) if t is not None}
        counts = {
            "precision/skipped_steps": record.skips,
            "precision/consecutive_skips": record.skips_in_row,
            "precision/skip_rate_pct": 100 * sum(self._recent) / len(self._recent),
            "precision/retried_steps": record.retries,
        }
        self._readout.add(list(tensors.values()), lambda values: {**counts, **dict(zip(tensors, values))})
