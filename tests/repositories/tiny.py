"""What the small projects of this folder share: a model, data and a config. They know Detectron2 and nothing else."""

import os

import torch
from detectron2.config import get_cfg
from detectron2.modeling import META_ARCH_REGISTRY
from torch import nn


@META_ARCH_REGISTRY.register()
class TinyArch(nn.Module):
    """Takes [{"x": Tensor (N, 8)}]. Keeps its losses in `history` and the dtype that it computed in in `dtypes`."""

    def __init__(self, cfg, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.history, self.dtypes = [], []

    def forward(self, batch):
        hidden = self.first(torch.cat([sample["x"] for sample in batch]))
        self.dtypes.append(hidden.dtype)
        y = self.second(torch.relu(hidden))
        if not self.training:
            return [{"scores": y}]
        y = y.float()
        losses = {"loss_a": (y - 1).pow(2).mean(), "loss_b": y.abs().mean()}
        self.history.append(sum(losses.values()).item())
        return losses


def loader(count=40):
    generator = torch.Generator().manual_seed(1)
    return [[{"x": torch.randn(4, 8, generator=generator)}] for _ in range(count)]


def setup(opts, folder, make=get_cfg):
    """As the `setup(args)` of a training script."""
    cfg = make()
    cfg.MODEL.META_ARCHITECTURE = "TinyArch"
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
    cfg.SOLVER.MAX_ITER = 5
    cfg.SOLVER.BASE_LR = 0.1
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.OUTPUT_DIR = str(folder)
    cfg.merge_from_list(opts)
    cfg.freeze()
    os.makedirs(folder, exist_ok=True)
    return cfg
