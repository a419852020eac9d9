"""A trainer whose constructor leaves out that of DefaultTrainer and builds everything itself."""

import weakref

import default
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer
from detectron2.engine.defaults import create_ddp_model
from detectron2.utils import comm


class Trainer(default.Trainer):
    def __init__(self, cfg):
        super(DefaultTrainer, self).__init__()
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        data_loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False)
        self._trainer = (AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer)(model, data_loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())
