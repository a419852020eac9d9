"""`Auditor`: the same batches, images, weights and random state through fp32 and through another precision."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

from .. import random_state
from ..errors import UserError
from ..numerics.island import unwrapped
from ..numerics.locate import bad_parameters
from ..numerics.protect import protect
from .detections import Detections, compare_predictions, predict
from .limits import TOLERANCE, Figure, figures_of, worst
from .modules import rank
from .training import gradient_errors, loss_errors, stages_of, train

NOISE_SEED = 17
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Measurement:
    """A policy, compared with fp32.

    Attributes:
        policy (PrecisionPolicy): that was measured.
        losses (dict): name -> (mean in fp32, mean in the precision, relative error).
        gradients (dict): stage -> (relative error, that of rounding noise).
        scale (float): of the losses in backward.
        failure (str): what the forward pass raised in training.
        detections (Detections or None): None without images.
        figures (list[Figure]): all errors with their limits.
    """

    policy: object
    losses: Dict[str, tuple]
    gradients: Dict[str, tuple]
    scale: float
    failure: str
    detections: Optional[Detections]
    figures: List[Figure]

    @property
    def excess(self):
        """By how much the worst error exceeds its limit: up to 1 is fine."""
        return worst(self.figures)


class Auditor:
    """Measures policies on one model. The model and the random state are left as they were: copies do the work.

    Attributes:
        policy (PrecisionPolicy): the one to audit, resolved.
        fp32 (PrecisionPolicy): what it is compared with.
    """

    def __init__(self, model, policy, batches, images=(), *, tolerance=TOLERANCE):
        """
        Args:
            model (nn.Module): with its weights, not protected.
            policy (PrecisionPolicy): resolved.
            batches (list): of training, as the model takes them.
            images (list[dict]): of evaluation, as the model takes them.
            tolerance (float): see `limits`.

        Raises:
            UserError: when there is nothing to compare: the model fails in fp32, too.
        """
        self.policy = policy
        self.fp32 = dataclasses.replace(policy, precision="fp32", fp32_modules=(), shield=False)
        self.reference = copy.deepcopy(unwrapped(model))
        self._batches, self._images, self._tolerance = batches, list(images), tolerance
        self._random = random_state.capture()
        self._copy, self._rankings = (None, None), {}
        self._wanted = train(self.reference, self.fp32, batches, self._random)
        self._check_reference()
        self._stages = stages_of(self.reference)
        self._noise = self._rounding_noise()
        self._predictions = predict(self.reference, self.fp32, self._images, self._random)

    def _check_reference(self):
        bad = bad_parameters(self.reference)
        values = [value for losses in self._wanted.losses for value in losses.values()]
        if self._wanted.failure or not values or not all(map(math.isfinite, values)):
            why = f"These weights are not finite: {', '.join(bad[:4])}." if bad else self._wanted.failure
            raise UserError(
                f"In fp32 the losses of the model are not finite, either: there is nothing to compare with. {why} Check "
                "the weights and the images; d2amp replay finds where it begins."
            )

    def _rounding_noise(self):
        """The errors of gradients in fp32 when every weight is off by up to half a unit in its last place."""
        dtype = DTYPES.get(self.policy.precision)
        step = torch.finfo(dtype).eps / 2 if dtype else 2.0**-11  # tf32 has the digits of fp16
        noisy = copy.deepcopy(self.reference)
        generator = torch.Generator().manual_seed(NOISE_SEED)
        with torch.no_grad():
            for parameter in noisy.parameters():
                noise = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + step * noise.to(parameter.device))
        found = train(noisy, self.fp32, self._batches, self._random, self._wanted.choices)
        return gradient_errors(found, self._wanted, self._stages)

    def protected(self, policy):
        """A copy of the model that is protected as a policy says. The last one is kept."""
        if self._copy[0] != policy:
            model = copy.deepcopy(self.reference)
            protect(model, policy)
            self._copy = (policy, model)
        return self._copy[1]

    def measure(self, policy=None):
        """How far a policy is from fp32.

        Args:
            policy (PrecisionPolicy or None): resolved; None is the audited one.

        Returns:
            Measurement
        """
        policy = policy or self.policy
        model = self.protected(policy)
        found = train(model, policy, self._batches, self._random, self._wanted.choices)
        losses = loss_errors(found, self._wanted)
        gradients = gradient_errors(found, self._wanted, self._stages)
        detections = None
        if self._images:
            detections = compare_predictions(predict(model, policy, self._images, self._random), self._predictions)
        figures = figures_of(losses, gradients, self._noise, detections, self._tolerance)
        return Measurement(
            policy,
            {name: (_mean(self._wanted, name), _mean(found, name), error) for name, error in losses.items()},
            {stage: (error, self._noise.get(stage, 0.0)) for stage, error in gradients.items()},
            found.scale,
            found.failure,
            detections,
            figures,
        )

    def ranking(self, policy, training):
        """Modules by the error that they add, the largest first: list[Added].

        Args:
            policy (PrecisionPolicy): resolved.
            training (bool): on the first batch in training mode, or on the first image in evaluation mode.
        """
        batch = self._batches[0] if training else self._images[:1]
        if not batch:
            return []
        if (policy, training) not in self._rankings:
            model = self.protected(policy)
            self._rankings[policy, training] = rank(
                model, self.reference, policy, self.fp32, batch, self._random, training
            )
        return self._rankings[policy, training]


def _mean(training, name):
    values = [losses.get(name, math.inf) for losses in training.losses]
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
