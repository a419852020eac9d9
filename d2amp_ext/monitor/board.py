"""TensorBoard made ready: the layout of its charts and the texts of a run."""

import platform
import sys

import detectron2
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from detectron2.utils.events import TensorboardXWriter

# Category -> chart -> tags, as patterns. Those of stages and the worst of the ranks come into the chart of their name.
_MORE = r"(_worst)?(/\w+)?$"
LAYOUT = {
    "Precision": {
        "gradient scale": ["precision/grad_scale"],
        "skipped and retried updates": ["precision/skipped_steps", "precision/consecutive_skips", "precision/retried_steps"],
        "skip rate, % of the last 1000 updates": ["precision/skip_rate_pct"],
        "gradient norm, L2": ["precision/grad_norm"],
        "headroom of fp16, octaves": ["precision/fp16_headroom_log2"],
        "underflow in fp16, % of values": ["precision/underflow_pct"],
        "gradients that are zero, % of values": ["precision/zero_gradient_pct"],
        "gradients that are not finite, values": ["precision/nonfinite_gradients"],
        "update to weight, log2": ["precision/update_to_weight_log2"],
    },
    "Speed": {
        "images per second": ["speed/images_per_second"],
        "seconds per step": ["speed/step_seconds", "speed/data_seconds"],
        "share of peak arithmetic, %": ["speed/mfu_pct"],
    },
    "Memory": {
        "GPU memory, GiB": ["memory/peak_allocated_gib", "memory/reserved_gib"],
        "allocations retried": ["memory/oom_retries"],
        "host memory, GiB": ["memory/host_rss_gib", "memory/host_peak_rss_gib"],
    },
}


class Board:
    """The TensorBoard of a run: the SummaryWriter inside Detectron2's TensorboardXWriter, which closes it too.

    Where there is no such writer the run has no TensorBoard, and `summary` is None.
    """

    def __init__(self, writers):
        self._writer = next((writer for writer in writers if isinstance(writer, TensorboardXWriter)), None)

    @property
    def summary(self):
        """The torch.utils.tensorboard.SummaryWriter, or None."""
        return None if self._writer is None else self._writer._writer

    def start_at(self, iteration):
        """Makes TensorBoard drop what an earlier run wrote from `iteration` on. Before anything is written."""
        arguments = getattr(self._writer, "_writer_args", None)  # older Detectron2 opens its file at once
        if iteration > 0 and arguments is not None and "_writer" not in vars(self._writer):
            arguments.setdefault("purge_step", iteration)


class BoardSetup(HookBase):
    """Writes layout and texts at the start. A resumed run takes back what it is about to write anew."""

    def __init__(self, board, texts):
        """
        Args:
            board (Board):
            texts (dict[str, str]): Markdown for the Text tab, by tag.
        """
        self._board = board
        self._texts = texts

    def before_train(self):
        self._board.start_at(self.trainer.iter)
        summary = self._board.summary
        if summary is None:
            return
        summary.add_custom_scalars(layout())
        for tag, text in self._texts.items():
            summary.add_text(tag, text, self.trainer.iter)


def layout():
    """LAYOUT as `SummaryWriter.add_custom_scalars` takes it."""
    return {
        category: {chart: ["Multiline", [tag + _MORE for tag in tags]] for chart, tags in charts.items()}
        for category, charts in LAYOUT.items()
    }


def run_texts(policy, device):
    """The texts of every run: its precision and its environment.

    Args:
        policy (PrecisionPolicy): of training, resolved.
        device (torch.device): of the model.
    """
    return {"run/precision": precision_text(policy), "run/environment": environment_text(device)}


def precision_text(policy):
    rows = {"precision": policy.precision, "why": policy.reason, "device": policy.device}
    if policy.precision != "off":
        rows["gradient scaler"] = "dynamic" if policy.uses_scaler else "none, this precision needs none"
        if policy.uses_scaler:
            scaler = policy.scaler
            rows["gradient scaler"] = f"fixed at {scaler.static:g}" if scaler.static else (
                f"dynamic from {scaler.init_scale:g} to no less than {scaler.min_scale:g}, times {scaler.growth_factor:g} "
                f"after {scaler.growth_interval} good updates, times {scaler.backoff_factor:g} after a skip"
            )  # fmt: skip
        rows["steps that are not finite"] = f"{policy.nonfinite}, at most {policy.max_consecutive_skips} in a row"
        rows["modules in fp32"] = ", ".join(policy.fp32_modules) or "none named"
    return f"{policy.describe()}\n\n{_table(rows)}"


def environment_text(device):
    rows = {
        "command": " ".join(sys.argv),
        "d2amp-ext": sys.modules[__package__.split(".")[0]].__version__,  # importing it would be a cycle
        "Detectron2": f"{detectron2.__version__} ({detectron2.__path__[0]})",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})",
        "processes": comm.get_world_size(),
        "threads per process": torch.get_num_threads(),
    }
    if device.type == "cuda":
        rows["CUDA, cuDNN"] = f"{torch.version.cuda or torch.version.hip}, {torch.backends.cudnn.version()}"
    return _table(rows)


def _table(rows):
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])
