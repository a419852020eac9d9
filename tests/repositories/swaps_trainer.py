"""Trainers that exchange the inner trainer after Detectron2 has made it."""

import default
from detectron2.engine import SimpleTrainer


class Counting(SimpleTrainer):
    """Adds to the trainer, and leaves the step as it is."""

    steps = 0

    def after_backward(self):
        self.steps += 1
        super().after_backward()


class Halving(SimpleTrainer):
    """Has a step of its own."""

    def run_step(self):
        losses = sum(self.model(next(self._data_loader_iter)).values()) / 2
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()


class Trainer(default.Trainer):
    inner = SimpleTrainer

    def __init__(self, cfg):
        super().__init__(cfg)
        self._trainer = self.inner(self._trainer.model, self.build_train_loader(cfg), self._trainer.optimizer)


class CountingTrainer(Trainer):
    inner = Counting


class HalvingTrainer(Trainer):
    inner = Halving
