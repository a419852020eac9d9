"""How fast the run is."""

import time

from detectron2.engine import HookBase

WARM_UP = 3  # first steps of a run, left out where there are others


class SpeedScalars(HookBase):
    """Seconds of a step and of waiting for data, images per second, and the share of the device's peak arithmetic.

    Means over the steps since the last reading. Evaluation and checkpoints between steps do not count, the monitor's
    own work does.
    """

    def __init__(self, readout, images_per_step, flop_meter=None, peak=None):
        """
        Args:
            readout (Readout):
            images_per_step (int): of one update, over all ranks.
            flop_meter (FlopMeter or None): registered too, in front of this hook.
            peak (float or None): operations per second of this rank's device.
        """
        self._readout = readout
        self._images_per_step = images_per_step
        self._flop_meter = flop_meter
        self._peak = peak
        self._warm_up = WARM_UP
        self._seconds = []
        self._since = -1  # iteration of the last reading

    def before_train(self):
        self._since = self.trainer.iter - 1

    def before_step(self):
        self._start = time.perf_counter()

    def after_step(self):
        self._seconds.append(time.perf_counter() - self._start)
        if self._readout.is_due(self.trainer):
            scalars = self._scalars()
            self._readout.add([], lambda _: scalars)

    def _scalars(self):
        seconds, self._seconds = self._seconds, []
        warm_up, self._warm_up = self._warm_up, max(self._warm_up - len(seconds), 0)
        seconds = seconds[warm_up:] or seconds
        # The reading of the last period ended after that period's clock.
        mean = (sum(seconds) + self._readout.seconds) / len(seconds)
        since, self._since = self._since, self.trainer.iter
        scalars = {"speed/step_seconds": mean, "speed/images_per_second": self._images_per_step / mean}
        waiting = data_seconds(self.trainer.storage, since)
        if waiting is not None:
            scalars["speed/data_seconds"] = waiting
        if self._peak and self._flop_meter is not None and self._flop_meter.flops:
            scalars["speed/mfu_pct"] = 100 * self._flop_meter.flops / mean / self._peak
        return scalars


def data_seconds(storage, since):
    """The mean time that this rank waited for data after iteration `since`, or None where nobody wrote it."""
    for name in ("rank_data_time", "data_time"):
        if name in storage.histories():
            recent = []
            for value, iteration in reversed(storage.history(name).values()):
                if iteration <= since:
                    break
                recent.append(value)
            if recent:
                return sum(recent) / len(recent)
    return None
