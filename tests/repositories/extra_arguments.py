"""A model that takes more than the data and returns more than losses, and the trainer for it."""

import default
from detectron2.modeling import META_ARCH_REGISTRY
from tiny import TinyArch


@META_ARCH_REGISTRY.register()
class BranchArch(TinyArch):
    def forward(self, batch, branch, *, weight=1.0):
        losses = super().forward(batch)
        return {f"{name}_{branch}": loss * weight for name, loss in losses.items()}, len(batch), None


class Trainer(default.Trainer):
    def run_step(self):
        data = next(self._trainer._data_loader_iter)
        losses, count, nothing = self.model(data, "weak", weight=0.5)
        assert set(losses) == {"loss_a_weak", "loss_b_weak"} and count == 1 and nothing is None
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self.optimizer.step()
