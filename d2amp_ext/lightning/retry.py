"""SOLVER.AMP.NONFINITE retry_fp32 with Lightning: the window once more, through Lightning's own forward and backward."""

import contextlib
import dataclasses

from .. import random_state


class Retry:
    """Runs the micro-batches of a window a second time, in fp32, from the random state of the first time.

    Attributes:
        running (bool): whether a second time is under way.
        policy (PrecisionPolicy): of the second time.
    """

    def __init__(self, policy):
        self.policy = dataclasses.replace(policy, precision="fp32")
        self.running = False
        self._before = None

    def remember(self):
        """Keeps the random state from before the first forward of a window."""
        if not self.running:
            self._before = random_state.capture()

    def run(self, module, optimizer):
        """Forward and backward of every micro-batch; gradients are added up anew.

        Args:
            module (LightningModule): with `window`, the list of (batch, batch_idx) of this update.
            optimizer (torch.optim.Optimizer):
        """
        strategy, steps = module.trainer.strategy, module.trainer.accumulate_grad_batches
        now = random_state.capture()
        random_state.restore(self._before)
        optimizer.zero_grad()
        with self._running(), self.policy.float32_switches():
            for batch, batch_idx in module.window:
                loss = strategy.training_step(batch, batch_idx)
                if loss is None:  # a forward that raised
                    break
                strategy.backward(loss / steps, optimizer)
        # Data loaders have drawn for micro-batches in between, from Python's and numpy's generators.
        random_state.restore({**random_state.capture(), "python": now["python"], "numpy": now["numpy"]})

    @contextlib.contextmanager
    def _running(self):
        self.running = True
        try:
            yield
        finally:
            self.running = False
