"""Keys of its own, one of which d2amp_ext has as well, added with a function as projects do."""

from detectron2.config import CfgNode, get_cfg


def add_tiny_config(cfg):
    cfg.SOLVER.OPTIMIZER = "ADAMW"
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.MODEL.TINY = CfgNode({"WIDTH": 16})


def make_cfg(before=(), after=()):
    cfg = get_cfg()
    for add in (*before, add_tiny_config, *after):
        add(cfg)
    return cfg
