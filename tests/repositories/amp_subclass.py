"""Subclasses of AMPTrainer, with and without a step of their own."""

import torch
from detectron2.engine import AMPTrainer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from tiny import loader, setup


class Named(AMPTrainer):
    """Adds to the constructor."""

    def __init__(self, name, model, data_loader, optimizer):
        self.name = name
        super().__init__(model, data_loader, optimizer, zero_grad_before_forward=True)
        self.ready = True


class Around(AMPTrainer):
    """Does something around the step."""

    def run_step(self):
        super().run_step()
        self.done = self.iter


class Own(AMPTrainer):
    """Has a step of its own, with autocast and the scaler of its constructor."""

    def run_step(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = sum(self.model(next(self._data_loader_iter)).values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()


def main(opts, folder, kind, *names):
    cfg = setup(opts, folder)
    model = build_model(cfg)
    trainer = kind(*names, model, loader(), build_optimizer(cfg, model))
    trainer.train(0, cfg.SOLVER.MAX_ITER)
    return trainer
