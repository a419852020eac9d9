"""Losses and gradients of one step in a precision, and how far they are from those in fp32. Nothing is changed by it."""

import math
import types
from dataclasses import dataclass
from typing import Dict, List

import torch

from ..monitor.stages import group_parameters
from ..numerics.apart import apart
from ..numerics.island import clean_name
from ..step import add_up, by_name
from .choices import Choices

LEAST_SHARE = 0.01  # of all losses together: the error of a smaller loss is told as a share of this


@dataclass
class Training:
    """Training passes of the same batches.

    Attributes:
        losses (list[dict[str, float]]): by name, one dict a batch; {} where the forward pass gave up.
        gradients (list[dict[str, Tensor]]): unscaled, by parameter, fp32.
        choices (list[Choices]): of each batch.
        scale (float): of the last backward pass.
        failure (str): what a forward or backward pass raised.
    """

    losses: List[Dict[str, float]]
    gradients: List[Dict[str, torch.Tensor]]
    choices: List[Choices]
    scale: float = 1.0
    failure: str = ""


def train(model, policy, batches, random, choices=None):
    """One forward and backward pass for each batch, all from the same weights and random state, in training mode.

    In fp16 the scale falls until the gradients are finite, as it does in a run.

    Args:
        model (nn.Module): protected as the policy says.
        policy (PrecisionPolicy): resolved.
        batches (list): what the model takes.
        random (dict): a state of `random_state.capture`.
        choices (list[Choices] or None): of another run, to be made here, too.

    Returns:
        Training
    """
    result = Training([], [], choices or [Choices() for _ in batches])
    scaler = policy.scaler
    result.scale = (scaler.static or scaler.init_scale) if policy.uses_scaler else 1.0
    for number, batch in enumerate(batches):
        held = result.choices[number]
        with policy.float32_switches(), apart(model, random):
            model.train()
            losses, gradients = {}, {}
            try:
                with held.held(model) if choices else held.recorded(model), policy.autocast():
                    losses = by_name(model(batch))
                gradients = _gradients(model, losses, policy, result)
            except Exception as error:
                if not is_of_the_precision(error, reference=choices is None):
                    raise
                result.failure = f"{type(error).__name__}: {error}"
            result.losses.append({name: loss.detach().float().item() for name, loss in losses.items()})
            result.gradients.append(gradients)
    return result


def is_of_the_precision(error, reference=False):
    """Whether an exception is a result of the audit: values that are not finite, and dtypes that do not fit, which fp32
    does not have. Running out of memory is none.
    """
    if isinstance(error, FloatingPointError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, torch.cuda.OutOfMemoryError) and not reference


def _gradients(model, losses, policy, result):
    total = add_up(losses) if losses else None
    if not getattr(total, "requires_grad", False):
        return {}
    found = {}

    def keep(name):
        def hook(gradient):
            found[name] = found[name] + gradient if name in found else gradient.detach().clone()

        return hook

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(keep(clean_name(name)))
    adapts = policy.uses_scaler and not policy.scaler.static and math.isfinite(total.item())
    while True:
        found.clear()
        (total * result.scale).backward(retain_graph=adapts)
        finite = all(torch.isfinite(gradient).all() for gradient in found.values())
        if finite or not adapts or result.scale <= policy.scaler.min_scale:
            return {name: gradient.float() / result.scale for name, gradient in found.items()}
        result.scale = max(result.scale * policy.scaler.backoff_factor, policy.scaler.min_scale)


def stages_of(model):
    """dict[str, list[str]]: the names of the parameters that learn, by stage."""
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = group_parameters(model, types.SimpleNamespace(param_groups=[{"params": learning}]))
    return {stage: [names[id(parameter)] for parameter in group] for stage, group in groups.items()}


def loss_errors(found, wanted):
    """dict[str, float]: the relative error of each loss, over all batches; infinite where it is not finite."""
    names = dict.fromkeys(name for losses in wanted.losses for name in losses)
    totals = [sum(map(abs, losses.values())) for losses in wanted.losses]
    errors = {}
    for name in names:
        distance = size = 0.0
        for got, want, total in zip(found.losses, wanted.losses, totals):
            if name in want:
                distance += abs(got.get(name, math.inf) - want[name])
                size += max(abs(want[name]), LEAST_SHARE * total)
        errors[name] = distance / size if math.isfinite(distance) and size else math.inf if distance else 0.0
    return errors


def gradient_errors(found, wanted, stages):
    """The L2 norm of the difference of the gradient over that of the gradient in fp32, by stage.

    Args:
        found, wanted (Training):
        stages (dict[str, list[str]]): as `stages_of` gives it.

    Returns:
        dict[str, float]: stages without a gradient are left out; infinite where one is not finite.
    """
    errors = {}
    for stage, names in stages.items():
        distance = size = 0.0
        for got, want in zip(found.gradients, wanted.gradients):
            for name in names:
                if name not in want:
                    continue
                size += want[name].double().square().sum().item()
                difference = want[name] - got[name] if name in got else torch.full_like(want[name], math.inf)
                distance += difference.double().square().sum().item()
        if size > 0:
            errors[stage] = math.sqrt(distance / size) if math.isfinite(distance) else math.inf
    return errors
