"""A detector of a few thousand parameters on a large canvas, with places where faults can be planted."""

import torch
import torch.nn.functional as F
from detectron2.structures import Boxes, Instances
from torch import nn

from d2amp_ext import PrecisionPolicy

CELLS, STRIDE, CLASSES = 8, 128, 3  # of a canvas of 1024 pixels


class Careful(nn.Module):
    """Weights of 300 that cancel: what is left of them is lost in 16 bit."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(channels, channels, 1, 1))

    def forward(self, x):
        return F.conv2d(x - x.mean(1, keepdim=True), self.weight + self.offset)

    offset = 300.0


class Head(nn.Module):
    """Scores and boxes of every cell; a planted head decodes in the precision of the features."""

    decodes_low = False

    def __init__(self, channels):
        super().__init__()
        self.out = nn.Conv2d(channels, CLASSES + 4, 1)

    def forward(self, x):
        out = self.out(x).flatten(2).transpose(1, 2)
        scores, deltas = out[..., :CLASSES], out[..., CLASSES:]
        deltas = deltas if self.decodes_low else deltas.float()
        y, x = torch.meshgrid(torch.arange(CELLS), torch.arange(CELLS), indexing="ij")
        centres = (torch.stack([x, y], -1).reshape(1, -1, 2) * STRIDE + STRIDE / 2).to(deltas)
        centres, sides = centres + 20 * deltas[..., :2], 20 * deltas[..., 2:].sigmoid() + 20
        return scores, torch.cat([centres - sides / 2, centres + sides / 2], -1)


class Grid(nn.Module):
    """Takes [{"image": (3, 8, 8)}]; training: two losses; evaluation: Instances with 40 px boxes on 1024 px."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.scale = 1.0
        if fault == "cancels":
            self.body.append(Careful(8))
        if fault == "overflows":
            with torch.no_grad():
                self.body[3].weight.mul_(1e6)
                self.body[3].bias.mul_(1e6)
            self.scale = 1e-6
        self.dropout = nn.Dropout(0.2)
        self.head = Head(8)
        self.head.decodes_low = fault == "decodes"
        self.eval_only = fault == "decodes"

    def forward(self, batch):
        images = torch.stack([sample["image"] for sample in batch])
        scores, boxes = self.head(self.dropout(self.body(images) * self.scale))
        if self.training:
            wanted = torch.stack([sample["boxes"] for sample in batch])
            labels = torch.stack([sample["labels"] for sample in batch])
            return {"loss_cls": F.cross_entropy(scores.float().flatten(0, 1), labels.flatten()),
                    "loss_box": (boxes.float() - wanted).abs().mean() / 10}  # fmt: skip
        return [self.instances(*pair) for pair in zip(scores.float().softmax(-1), boxes.float())]

    @staticmethod
    def instances(scores, boxes):
        best = scores.max(-1)
        size = CELLS * STRIDE
        return {"instances": Instances((size, size), pred_boxes=Boxes(boxes), scores=best.values, pred_classes=best.indices)}


def grid(fault=""):
    """(model, training batches, images), the same every time."""
    torch.manual_seed(3)
    model = Grid(fault)
    wanted = Grid().head(torch.randn(4, 8, CELLS, CELLS))[1].detach()
    samples = [{"image": torch.randn(3, CELLS, CELLS), "boxes": boxes, "labels": torch.arange(CELLS**2) % CLASSES,
                "file_name": f"{number}.png"} for number, boxes in enumerate(wanted)]  # fmt: skip
    return model, [samples[:2], samples[2:]], [{"image": sample["image"]} for sample in samples]


def policy(precision, **options):
    return PrecisionPolicy(precision, **options).resolve("cpu")
