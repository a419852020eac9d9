"""A `get_cfg` of its own, from a copy of Detectron2's defaults that was made when the project was imported."""

import copy

import default
from detectron2.config.defaults import _C
from tiny import setup

_DEFAULTS = copy.deepcopy(_C)
_DEFAULTS.MODEL.TINY_WIDTH = 16


def get_cfg():
    return _DEFAULTS.clone()


def main(opts, folder):
    trainer = default.Trainer(setup(opts, folder, get_cfg))
    trainer.train()
    return trainer
