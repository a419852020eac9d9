"""The hooks of the monitor put together, for every kind of run."""

from detectron2.data import MetadataCatalog
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils import comm

from .board import Board, BoardSetup, run_texts
from .console import Console
from .devices import peak_flops
from .flops import FlopMeter
from .gradients import GradientScalars
from .histograms import GradientHistograms
from .images import PredictionImages
from .memory import MemoryScalars
from .readout import Readout, WriteReadout
from .speed import SpeedScalars
from .stages import group_parameters, unwrap
from .steps import StepScalars
from .updates import UpdateScalars


def build_monitor_hooks(cfg, policy, model, optimizer, *, writers=(), texts=None):
    """The hooks that MONITOR asks for; none when MONITOR.PERIOD is 0.

    Args:
        cfg (CfgNode): with the keys of `add_amp_config`.
        policy, model, optimizer, writers, texts: as for `make_monitor_hooks`.

    Returns:
        list[HookBase]
    """
    if not cfg.MONITOR.PERIOD:
        return []
    return make_monitor_hooks(
        policy,
        model,
        optimizer,
        period=cfg.MONITOR.PERIOD,
        images_per_step=cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATE_STEPS,
        writers=writers,
        texts=texts,
        metadata=MetadataCatalog.get(cfg.DATASETS.TEST[0]) if cfg.DATASETS.TEST else None,
        image_format=getattr(unwrap(model), "input_format", None) or cfg.INPUT.FORMAT,
    )


def make_monitor_hooks(
    policy, model, optimizer, *, period, images_per_step, writers=(), texts=None, metadata=None, image_format="BGR"
):
    """The hooks of the monitor from explicit arguments. Every rank must register them.

    They use `last_step` (where there is one), `storage`, `iter` and `max_iter` of the trainer that they are registered
    on. Statistics of gradients and updates need that trainer to call `after_backward` with unscaled gradients.

    Args:
        policy (PrecisionPolicy): of training, resolved.
        model (nn.Module): as it is or in DistributedDataParallel.
        optimizer (torch.optim.Optimizer):
        period (int): iterations between two readings, 1 or more.
        images_per_step (int): of one update, over all ranks.
        writers (list[EventWriter]): of the run; those of other ranks than the main one are not used. With a
            TensorboardXWriter among them TensorBoard gets layout, texts, histograms and images.
        texts (dict[str, str] or None): Markdown for TensorBoard's Text tab, by tag, beside precision and environment.
        metadata (Metadata or None): of the data set that is evaluated, for the names of its classes.
        image_format (str): of the model's input, as INPUT.FORMAT.

    Returns:
        list[HookBase]: in order. `place` puts them where they belong among other hooks.
    """
    readout = Readout(period)
    stages = group_parameters(model, optimizer)
    device = next(model.parameters()).device
    peak = peak_flops(device, policy.precision)
    meter = FlopMeter() if peak else None
    gradients = GradientScalars(readout, stages)
    hooks = [
        meter,
        SpeedScalars(readout, images_per_step, meter, peak),
        StepScalars(readout),
        gradients,
        UpdateScalars(readout, stages),
        MemoryScalars(readout, device),
        WriteReadout(readout),
    ]
    if comm.is_main_process():
        board = Board(writers)
        hooks += [
            Console(policy, writers),
            BoardSetup(board, {**run_texts(policy, device), **(texts or {})}),
            GradientHistograms(readout, gradients, board),
            PredictionImages(board, model, metadata, image_format),
        ]
    return [hook for hook in hooks if hook is not None]


def writers_of(hooks):
    """The writers of the PeriodicWriters among the hooks of a trainer."""
    return [writer for hook in hooks if isinstance(hook, PeriodicWriter) for writer in hook._writers]


def place(monitor_hooks, hooks):
    """All hooks in the order to register them.

    The monitor's go first, so that evaluation and checkpoints are not taken for a part of a step and writers find what
    was read. Those that are `late` go behind all others but the writers.
    """
    late = [hook for hook in monitor_hooks if getattr(hook, "late", False)]
    first = [hook for hook in monitor_hooks if hook not in late]
    end = next((i for i, hook in enumerate(hooks) if isinstance(hook, PeriodicWriter)), len(hooks))
    return [*first, *hooks[:end], *late, *hooks[end:]]
