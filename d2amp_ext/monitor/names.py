"""The names of the monitor's scalars: data only. docs/monitor.md says what each one means.

No name contains "loss": Detectron2's console would print it among the losses.
"""

WORST = "_worst"  # suffix of the worst value over ranks

# Name -> which side of it is the worse one when ranks differ.
SCALARS = {
    "precision/grad_scale": min,
    "precision/skipped_steps": max,
    "precision/consecutive_skips": max,
    "precision/skip_rate_pct": max,
    "precision/retried_steps": max,
    "precision/grad_norm": max,
    "precision/fp16_headroom_log2": min,
    "precision/underflow_pct": max,
    "precision/zero_gradient_pct": max,
    "precision/nonfinite_gradients": max,
    "precision/update_to_weight_log2": max,
    "speed/step_seconds": max,
    "speed/data_seconds": max,
    "speed/images_per_second": min,
    "speed/mfu_pct": min,
    "memory/peak_allocated_gib": max,
    "memory/reserved_gib": max,
    "memory/oom_retries": max,
    "memory/host_rss_gib": max,
    "memory/host_peak_rss_gib": max,
}

# Those that are also written for each stage of the model, as `<name>/<stage>`.
PER_STAGE = (
    "precision/grad_norm",
    "precision/fp16_headroom_log2",
    "precision/underflow_pct",
    "precision/zero_gradient_pct",
    "precision/nonfinite_gradients",
    "precision/update_to_weight_log2",
)


def base_of(name):
    """The entry of SCALARS that a name with a stage belongs to."""
    return "/".join(name.split("/")[:2])
