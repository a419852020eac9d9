"""The configuration keys of d2amp_ext: data only."""

# Every key that add_amp_config adds, with its default. SOLVER.AMP.ENABLED is Detectron2's own.
DEFAULTS = {
    # The precision of training: auto, fp32, tf32, fp16, bf16 (or a spelling of precisions.SPELLINGS).
    "SOLVER.AMP.PRECISION": "auto",
    # Dynamic loss scaling, fp16 only. torch.amp.GradScaler's defaults.
    "SOLVER.AMP.SCALER.INIT_SCALE": 65536.0,
    "SOLVER.AMP.SCALER.GROWTH_FACTOR": 2.0,
    "SOLVER.AMP.SCALER.BACKOFF_FACTOR": 0.5,
    "SOLVER.AMP.SCALER.GROWTH_INTERVAL": 2000,  # updates
    # The scale never falls below this.
    "SOLVER.AMP.SCALER.MIN_SCALE": 1.0,
    # A fixed scale when above 0.
    "SOLVER.AMP.SCALER.STATIC": 0.0,
    # What a loss or gradient that is not finite does: skip, raise, retry_fp32.
    "SOLVER.AMP.NONFINITE": "skip",
    # More skipped updates in a row end the run.
    "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS": 20,
    # Glob patterns over qualified module names or class names that stay in fp32.
    "SOLVER.AMP.FP32_MODULES": (),
    # Whether operators known to be wrong or missing in 16 bit run in fp32.
    "SOLVER.AMP.SHIELD": True,
    # Whether the bundles of bad steps under OUTPUT_DIR/nonfinite hold the model's weights, too.
    "SOLVER.AMP.BUNDLE_WEIGHTS": False,
    # Whether the LR schedule waits when an update is skipped. False: the LR is a function of the iteration.
    "SOLVER.AMP.HOLD_LR_ON_SKIP": False,
    # The entry of TRAINER_REGISTRY that trains when AMP is enabled.
    "SOLVER.AMP.TRAINER": "AMPTrainer",
    # Gradient compression of DDP: none, bf16, fp16, powersgd.
    "SOLVER.AMP.COMM_HOOK": "none",
    # Log the gradient scale at every iteration as "[metric]grad_scaler" (d2go's key and Detectron2's name).
    "SOLVER.AMP.LOG_GRAD_SCALER": False,
    # Micro-batches per update. IMS_PER_BATCH is the size of one of them over all ranks.
    "SOLVER.ACCUMULATE_STEPS": 1,
    # SGD or ADAMW.
    "SOLVER.OPTIMIZER": "SGD",
    # Arguments of torch's DistributedDataParallel.
    "SOLVER.DDP.FIND_UNUSED_PARAMETERS": False,
    "SOLVER.DDP.STATIC_GRAPH": False,
    "SOLVER.DDP.GRADIENT_AS_BUCKET_VIEW": False,
    "SOLVER.DDP.BROADCAST_BUFFERS": False,
    "SOLVER.DDP.BUCKET_CAP_MB": 25,  # MiB
    # How many checkpoints are kept. 0: all.
    "SOLVER.CHECKPOINT_KEEP": 0,
    # What a failing checkpoint write does: continue, stop.
    "SOLVER.CHECKPOINT_ON_ERROR": "continue",
    # What running out of memory does: raise, split.
    "SOLVER.OOM": "raise",
    # The precision of evaluation, its own choice.
    "TEST.AMP.ENABLED": False,
    "TEST.AMP.PRECISION": "auto",
    # Data sets to register: "name=coco:ANNOTATIONS.json:IMAGE_DIR" and "name=voc:DIR:SPLIT".
    "DATASETS.REGISTER": (),
    # How many unreadable samples are tolerated.
    "DATALOADER.MAX_BAD_SAMPLES": 0,
    # Faster replacements: 0 none, 1 the same results bit for bit, 2 the same up to rounding or order of random draws.
    "FAST.LEVEL": 1,
    "FAST.DISABLE": (),
    # Iterations between reads of device values. 0 turns the monitor off.
    "MONITOR.PERIOD": 20,
    # Extra writers.
    "MONITOR.WRITERS": (),
}

# Keys whose machinery this version does not have yet, with the values that need none.
NOT_YET = {
    "SOLVER.AMP.COMM_HOOK": ("none",),
    "SOLVER.CHECKPOINT_KEEP": (0,),
    "SOLVER.CHECKPOINT_ON_ERROR": ("continue",),
    "SOLVER.OOM": ("raise",),
    "DATALOADER.MAX_BAD_SAMPLES": (0,),
    "FAST.LEVEL": (0, 1),
    "FAST.DISABLE": ((), []),
    "MONITOR.WRITERS": ((), []),
}
