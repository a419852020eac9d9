"""Chooses the trainer itself, from names imported long before, and runs it without DefaultTrainer."""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import AMPTrainer, SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from tiny import loader, setup


def main(opts, folder, resume=False, **options):
    cfg = setup(opts, folder)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    trainer = (AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer)(model, loader(), optimizer, **options)
    checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=trainer)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=build_lr_scheduler(cfg, optimizer)),
            hooks.PeriodicCheckpointer(checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD),
        ]
    )
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    trainer.train(trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0, cfg.SOLVER.MAX_ITER)
    return trainer
