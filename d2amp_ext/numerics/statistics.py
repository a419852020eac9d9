"""Running statistics of normalization layers, so that a step that is dropped leaves none behind."""

import torch
from torch.nn.modules.batchnorm import _NormBase

from .island import unwrapped


class RunningStatistics:
    """Remembers the running statistics of a model from before a step. Copies on the device; waits for nothing."""

    def __init__(self, model):
        """
        Args:
            model (nn.Module): in DistributedDataParallel or not.
        """
        norms = [m for m in unwrapped(model).modules() if isinstance(m, _NormBase) and m.track_running_stats]
        # The dicts themselves: to look up three attributes of a hundred modules takes as long as to copy them.
        self._buffers = [(m._buffers, name) for m in norms for name, value in m._buffers.items() if value is not None]
        self._saved = None

    def save(self):
        """Remembers them as they are."""
        live = self._live()
        if not self._saved or self._saved[0].device != live[0].device:
            self._saved = [tensor.clone() for tensor in live]
        else:
            torch._foreach_copy_(self._saved, live)

    @torch.no_grad()
    def restore(self):
        """Puts back what `save` remembered."""
        if self._saved:
            torch._foreach_copy_(self._live(), self._saved)

    def _live(self):
        return [buffers[name] for buffers, name in self._buffers]
