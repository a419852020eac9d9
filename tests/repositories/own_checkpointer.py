"""A trainer that replaces its checkpointer by one that knows the model only."""

import default
from detectron2.checkpoint import DetectionCheckpointer


class Trainer(default.Trainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.checkpointer = DetectionCheckpointer(self.model, cfg.OUTPUT_DIR)
