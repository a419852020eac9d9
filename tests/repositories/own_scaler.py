"""A project with mixed precision of its own: a key for it, autocast and a gradient scaler."""

import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from tiny import loader, setup


def make_cfg():
    cfg = get_cfg()
    cfg.SOLVER.FP16 = False
    return cfg


def main(opts, folder):
    cfg = setup(opts, folder, make_cfg)
    model = build_model(cfg).train()
    optimizer = build_optimizer(cfg, model)
    scaler = torch.amp.GradScaler("cpu", enabled=cfg.SOLVER.FP16, init_scale=128.0)
    for data, _ in zip(loader(), range(cfg.SOLVER.MAX_ITER)):
        with torch.autocast("cpu", dtype=torch.float16, enabled=cfg.SOLVER.FP16):
            losses = sum(model(data).values())
        optimizer.zero_grad()
        scaler.scale(losses).backward()
        scaler.step(optimizer)
        scaler.update()
    return model
