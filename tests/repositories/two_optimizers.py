"""A trainer with an optimizer for each half of the model."""

import default
import torch


class Trainer(default.Trainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.second_optimizer = torch.optim.Adam(self.model.second.parameters(), lr=0.01)

    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.SGD(model.first.parameters(), lr=cfg.SOLVER.BASE_LR)

    def run_step(self):
        losses = sum(self.model(next(self._trainer._data_loader_iter)).values())
        for optimizer in (self.optimizer, self.second_optimizer):
            optimizer.zero_grad()
        losses.backward()
        for optimizer in (self.optimizer, self.second_optimizer):
            optimizer.step()
