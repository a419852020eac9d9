"""The micro-batches of one update, as a precision plugin sees them."""

from dataclasses import dataclass, field
from typing import Optional

import torch


@dataclass
class Window:
    """What is known of an update so far.

    Attributes:
        total (Tensor or None): the sum of the losses, an fp32 scalar.
        losses (dict[str, Tensor]): averaged over micro-batches, fp32 scalars.
        named (dict or None): the losses of the micro-batch whose backward is next.
        failure (object): what a forward of this rank raised.
        cause (str or None): of a skip that all ranks know of.
        concluded (bool): whether the update was made or skipped.
    """

    total: Optional[torch.Tensor] = None
    losses: dict = field(default_factory=dict)
    named: Optional[dict] = None
    failure: object = None
    cause: Optional[str] = None
    concluded: bool = False

    @property
    def is_new(self):
        """Whether no micro-batch is in it yet."""
        return self.total is None and self.cause is None

    def add(self, loss, micro_batches):
        """Adds a micro-batch.

        Args:
            loss (Tensor): whose backward is run, a share of the update's loss already.
            micro_batches (int): of the update; the named losses are not divided yet.
        """
        loss = (loss.float() if loss.dtype.itemsize < 4 else loss).reshape(())
        self.total = loss if self.total is None else self.total + loss
        if self.named is None:
            self.named, micro_batches = {"total_loss": loss}, 1
        for name, value in self.named.items():
            value = value.to(loss.device, torch.float32).reshape(())
            value = value if micro_batches == 1 else value / micro_batches
            self.losses[name] = self.losses[name] + value if name in self.losses else value
        self.named = None
