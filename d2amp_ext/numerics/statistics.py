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
        self._norms = [m for m in unwrapped(model).modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._saved = None

    def save(self):
        """Remembers them as they are."""
        live = self._live()
        if self._saved is None or any(a.device != b.device or a.dtype != b.dtype for a, b in zip(self._saved, live)):
            self._saved = [tensor.clone() for tensor in live]
        elif live:
            torch._foreach_copy_(self._saved, live)

    @torch.no_grad()
    def restore(self):
        """Puts back what `save` remembered."""
        if self._saved:
            torch._foreach_copy_(self._live(), self._saved)

    def _live(self):
        buffers = [(m.running_mean, m.running_var, m.num_batches_tracked) for m in self._norms]
        return [tensor for group in buffers for tensor in group if tensor is not None]
