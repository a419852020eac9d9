"""A loop with a model that comes from nowhere that Detectron2 knows."""

import torch
from tiny import TinyArch, loader, setup


def main(opts, folder):
    cfg = setup(opts, folder)
    model = TinyArch(cfg).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.SOLVER.BASE_LR)
    for data, _ in zip(loader(), range(cfg.SOLVER.MAX_ITER)):
        losses = sum(model(data).values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    return model
