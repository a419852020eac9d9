"""How large the gradients of each stage are, and what fp16 would make of them."""

import math

import torch
from detectron2.engine import HookBase

FP16_MAX = 65504.0
FLUSHED_BELOW_LOG2 = -25  # half of fp16's smallest number: what is below is rounded to zero
OCTAVES = 256  # one for each exponent of fp32: [0] is zero and below 2^-126, [255] infinite or NaN
BIAS = 127  # octave number of the values in [1, 2)
CHUNK = 2**24  # most values that are copied at once


class GradientScalars(HookBase):
    """Norm, fp16's headroom, underflow, zeros and values that are not finite, per stage and over all.

    Unscaled gradients are counted by octave on the device, in a step that is read and in no other. The rest follows
    from the counts on the host, so that infinite values are a count like any other.

    Attributes:
        octaves (dict[str, list[float]]): of the last reading, for each stage OCTAVES counts of |gradient|.
        scale (float): of the last reading; 1 without a scaler.
    """

    def __init__(self, readout, stages):
        """
        Args:
            readout (Readout):
            stages (dict[str, list[Parameter]]): as `group_parameters` gives them.
        """
        self._readout = readout
        self._stages = stages
        self._measured = {}
        self.octaves = {}
        self.scale = 1.0

    def after_backward(self):
        if self._readout.is_due(self.trainer):
            self._measured = {stage: parts for stage, p in self._stages.items() if (parts := measure(p)) is not None}

    def after_step(self):
        if not self._readout.is_due(self.trainer):
            return
        measured, self._measured = self._measured, {}
        self.octaves = {}
        if not measured:  # the forward pass was given up, or this trainer has no after_backward
            return
        scale = getattr(getattr(self.trainer, "last_step", None), "scale", None)
        sizes = {stage: tensor.numel() for stage, tensor in measured.items()}
        tensors = list(measured.values()) + ([] if scale is None else [scale])
        self._readout.add(tensors, lambda values: self._finish(sizes, values))

    def _finish(self, sizes, values):
        position = sum(sizes.values())
        self.scale = values[position] if position < len(values) else 1.0
        scalars, all_norms, peaks, totals, position = {}, [], [], [0.0] * OCTAVES, 0
        for stage, size in sizes.items():
            counts = values[position : position + OCTAVES]
            peak, *norms = values[position + OCTAVES : position + size]
            position += size
            self.octaves[stage] = counts
            all_norms += norms
            peaks.append(peak)
            totals = [a + b for a, b in zip(totals, counts)]
            for name, value in summarize(counts, peak, norms, self.scale).items():
                scalars[f"{name}/{stage}"] = value
        worst = math.nan if any(math.isnan(peak) for peak in peaks) else max(peaks)
        return {**summarize(totals, worst, all_norms, self.scale), **scalars}


@torch.no_grad()
def measure(parameters):
    """Counts by octave, the largest |gradient| and L2 norms of parts of the gradients, as one fp32 vector on the device.

    Returns:
        Tensor or None: (OCTAVES + 1 + number of parts,); None when no parameter has a gradient.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not gradients:
        return None
    device = gradients[0].device
    counts = torch.zeros(OCTAVES, dtype=torch.int32, device=device)
    peaks, norms = [], []
    for chunk in _chunks([g.reshape(-1) for g in gradients]):
        flat = torch.cat([g.to(device, torch.float32) for g in chunk])
        low, high = torch.aminmax(flat)
        peaks.append(torch.maximum(-low, high))
        norms.append(torch.linalg.vector_norm(flat))
        counts += count_octaves(flat)
    return torch.cat([counts.float(), torch.stack(peaks).amax()[None], torch.stack(norms)])


def _chunks(flat):
    """Lists of 1-D tensors with no more than CHUNK values together."""
    chunk, room = [], CHUNK
    for tensor in flat:
        for piece in tensor.split(CHUNK) if tensor.numel() > CHUNK else (tensor,):
            if piece.numel() > room:
                yield chunk
                chunk, room = [], CHUNK
            chunk.append(piece)
            room -= piece.numel()
    if chunk:
        yield chunk


def count_octaves(flat):
    """How many values have which exponent. Overwrites `flat`, an fp32 vector. Returns int32 (OCTAVES,)."""
    exponents = flat.view(torch.int32).bitwise_right_shift_(23).bitwise_and_(OCTAVES - 1)
    if flat.is_cuda:
        if torch.are_deterministic_algorithms_enabled():  # in which histc is an error
            return count_sorted(exponents)
        return torch.histc(exponents, OCTAVES, 0, OCTAVES - 1)
    counts = torch.zeros(OCTAVES, dtype=torch.int32, device=flat.device)
    one = torch.ones(1, dtype=torch.int32, device=flat.device)
    return counts.index_add_(0, exponents, one.expand(len(exponents)))


def count_sorted(exponents):
    """Counts of int32 values below OCTAVES, without atomic additions and without waiting for the device."""
    edges = torch.arange(OCTAVES + 1, dtype=torch.int32, device=exponents.device)
    return torch.searchsorted(exponents.sort().values, edges).diff().to(torch.int32)


def summarize(counts, peak, norms, scale):
    """The scalars of a stage.

    Args:
        counts (list[float]): by octave.
        peak (float): the largest |gradient|; infinite or NaN when one is.
        norms (list[float]): of parts of the gradients; infinite when a square overflows, and then not written.
        scale (float): by which fp16 multiplies gradients.
    """
    values, zeros, bad = sum(counts), counts[0], counts[OCTAVES - 1]
    scalars = {"precision/nonfinite_gradients": bad, "precision/zero_gradient_pct": 100 * zeros / values}
    if not bad:
        scalars["precision/grad_norm"] = math.hypot(*norms)
        if peak > 0:
            scalars["precision/fp16_headroom_log2"] = math.log2(FP16_MAX) - math.log2(peak) - math.log2(scale)
    finite = values - zeros - bad
    scalars["precision/underflow_pct"] = 100 * flushed(counts, scale) / finite if finite else 0.0
    return scalars


def flushed(counts, scale):
    """How many values fp16 rounds to zero at a scale: exact for powers of two, else interpolated within one octave."""
    limit = FLUSHED_BELOW_LOG2 - math.log2(scale) + BIAS
    return sum(count * min(max(limit - octave, 0), 1) for octave, count in enumerate(counts[:-1]) if octave)
