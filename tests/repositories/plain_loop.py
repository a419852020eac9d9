"""A loop without any trainer."""

import torch
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from tiny import loader, setup


def main(opts, folder, build=build_model):
    cfg = setup(opts, folder)
    model = build(cfg)
    model.train()
    optimizer = build_optimizer(cfg, model)
    for data, _ in zip(loader(), range(cfg.SOLVER.MAX_ITER)):
        losses = sum(model(data).values())
        assert torch.isfinite(losses)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    return model
