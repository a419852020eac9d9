# Settings of a LazyConfig training run: what Detectron2's common/train.py holds, and the settings of d2amp_ext in lower
# case. A plain dict, so that any training script can read it. Use it from a config file beside this folder:
#
#     from ..common.train import train
#
# and change values with `train.amp.precision = "bf16"` there, or `train.amp.precision=bf16` on the command line. A name
# that is not known in `amp`, `eval_amp`, `fast` or `monitor` is an error.
train = dict(
    # Folder of checkpoints, metrics and logs.
    output_dir="./output",
    # Weights to start from: a path, a URL or a detectron2:// name. "" is a random start.
    init_checkpoint="",
    # Number of updates (a window of accumulate_steps micro-batches makes one).
    max_iter=90000,
    # Mixed precision of training.
    amp=dict(
        # The master switch. False trains exactly as stock Detectron2 does, and nothing else in `amp` counts.
        enabled=False,
        # auto, fp32, tf32, fp16 or bf16. auto takes the best that the device does natively.
        precision="auto",
        # Dynamic loss scaling, for fp16 only.
        scaler=dict(
            # Scale of the first update; 65536 is 2 to the power of 16.
            init_scale=65536.0,
            # The scale is multiplied by this after growth_interval updates in a row without a skip. Above 1.
            growth_factor=2.0,
            # The scale is multiplied by this after a skipped update. Between 0 and 1.
            backoff_factor=0.5,
            # Updates.
            growth_interval=2000,
            # The scale never falls below it.
            min_scale=1.0,
            # Above 0: a scale that never changes, in place of the dynamic one.
            static=0.0,
        ),
        # What a non-finite loss or gradient does: skip the update, raise, or retry_fp32.
        nonfinite="skip",
        # More skipped updates in a row than this end the run.
        max_consecutive_skips=20,
        # Glob patterns over qualified module names or class names that stay in fp32.
        fp32_modules=[],
        # Whether operators known to be wrong or missing in 16 bit run in fp32.
        shield=True,
        # Whether the bundles of bad steps in the folder nonfinite/ hold the model's weights, too.
        bundle_weights=False,
        # Whether a skipped update holds the learning rate back. False: it is a function of the iteration alone.
        hold_lr_on_skip=False,
        # Entry of TRAINER_REGISTRY that makes the trainer.
        trainer="AMPTrainer",
        # Compression of gradients between processes: none, bf16, fp16 or powersgd.
        comm_hook="none",
        # Whether the gradient scale is also logged under d2go's name.
        log_grad_scaler=False,
    ),
    # Micro-batches per update. total_batch_size is one micro-batch, over all processes.
    accumulate_steps=1,
    # Precision of evaluation, a choice of its own.
    eval_amp=dict(
        # False evaluates as stock Detectron2 does.
        enabled=False,
        # auto, fp32, tf32, fp16 or bf16.
        precision="auto",
    ),
    # Faster parts in place of Detectron2's.
    fast=dict(
        # 0 stock; 1 the same numbers, faster; 2 also what changes rounding or the order of random draws.
        level=1,
        # Names of single parts to leave out.
        disable=[],
    ),
    # What is written about the precision while training.
    monitor=dict(
        # Iterations between two readings of device values. 0 turns the monitor off.
        period=20,
        # Names of extra writers.
        writers=[],
    ),
    # Options of DistributedDataParallel.
    ddp=dict(
        # Whether buffers are sent from the first process to the others at every step.
        broadcast_buffers=False,
        # Whether parameters may go without a gradient. Costs time; only for models that need it.
        find_unused_parameters=False,
        # Detectron2's own switch for sending gradients in fp16.
        fp16_compression=False,
    ),
    # Options of PeriodicCheckpointer: updates between checkpoints, and how many of them are kept.
    checkpointer=dict(period=5000, max_to_keep=100),
    # Updates between evaluations. 0: only at the end.
    eval_period=5000,
    # Updates between two lines of the log.
    log_period=20,
    # cuda, cpu, xpu or mps.
    device="cuda",
    # Seed of all random generators. Negative: another one for every run.
    seed=-1,
    # Whether cuDNN tries several algorithms for each shape of input.
    cudnn_benchmark=False,
    # Detectron2's switch for TF32 (highest, high, medium; "" leaves torch alone). Must not contradict amp.precision.
    float32_precision="",
)
