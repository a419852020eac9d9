"""Precision, scale and skips at the end of Detectron2's line of the console."""

import logging
import math

from detectron2.engine import HookBase
from detectron2.utils.events import CommonMetricPrinter


class ConsoleNote(logging.LoggerAdapter):
    """Adds a note to every message. CommonMetricPrinter and its subclasses log their line through `self.logger`."""

    def __init__(self, logger, note):
        super().__init__(logger, {})
        self._note = note

    def process(self, message, kwargs):
        return f"{message}  {self._note()}", kwargs


class Console(HookBase):
    """Gives the printers among the writers a ConsoleNote. With AMP off their line stays as it is."""

    def __init__(self, policy, writers):
        """
        Args:
            policy (PrecisionPolicy): resolved.
            writers (list[EventWriter]):
        """
        self._policy = policy
        self._printers = [writer for writer in writers if isinstance(writer, CommonMetricPrinter)]

    def before_train(self):
        for printer in self._printers:
            if self._policy.precision != "off" and not isinstance(printer.logger, ConsoleNote):
                printer.logger = ConsoleNote(printer.logger, self.note)

    def note(self):
        """Such as "fp16  scale: 2^16  skips: 3", under 40 characters. Reads no device."""
        history = self.trainer.storage.histories().get("precision/grad_scale")
        record = getattr(self.trainer, "last_step", None)
        parts = [self._policy.precision]
        if history is not None:
            parts.append(f"scale: {short(history.latest())}")
        if record is not None:
            parts.append(f"skips: {record.skips}")
        return "  ".join(parts)


def short(scale):
    """A power of two as such, other numbers with three digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale > 1 else f"{scale:.3g}"
