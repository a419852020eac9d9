"""What a replay of a step found: values, and how they are told."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Dict, Optional, Tuple


@dataclass(frozen=True)
class Place:
    """Where values stopped being finite.

    Attributes:
        module (str): qualified name; "" is the model itself.
        cls (str): its class.
        kind (str): "NaN", "infinite", or "not finite" where only the model itself noticed.
        dtype (str): of the values that are not finite, such as "float16".
        largest (float): the largest finite magnitude before: of the module's inputs, or of the gradients that came in.
        weight (float): the largest magnitude among the module's own parameters; 0 when it has none.
        before (str): of another module: not this one's output, but what its own code hands to that one; in backward,
            to which the gradient goes back.
        op (str): backward only: the node of the graph, such as "SqrtBackward0".
        came_in (bool): whether what came in was not finite already.
    """

    module: str
    cls: str
    kind: str
    dtype: str
    largest: float = 0.0
    weight: float = 0.0
    before: str = ""
    op: str = ""
    came_in: bool = False

    def describe(self):
        name = f"{self.module} ({self.cls}" if self.module else f"the model's own code ({self.cls}"
        text = f"{name}{', ' + self.op if self.op else ''}): {self.kind} in {self.dtype}"
        if self.before:
            text += f", in what {'goes back' if self.op else 'its code hands'} to {self.before}"
        text += f", largest magnitude before it {self.largest:.4g}"
        text += f", largest weight {self.weight:.4g}" if self.weight else ""
        return text + (", what came in was not finite already" if self.came_in else "")


@dataclass(frozen=True)
class Finding:
    """What a replay of the batches of a step found.

    Attributes:
        precision (str): in which it was replayed.
        micro_batch (int): the one of the window where something was not finite, from 1; 0 when all was finite.
        forward (Place or None): the first module, in forward order, whose output was not finite.
        backward (Place or None): the first, in backward order, whose gradient was not finite. Looked for when the
            losses are finite.
        terms (tuple[str]): the loss terms that were not finite, or whose own gradient was not.
        losses (dict[str, float]): the losses by name, averaged over the micro-batches that were replayed.
        failure (str): of the FloatingPointError that the forward pass raised.
        parameters (tuple[str]): parameters and running statistics that are not finite.
        inputs (tuple[str]): inputs that are not finite, as "image file: field".
        note (str): what was different from the step itself.
    """

    precision: str
    micro_batch: int = 0
    forward: Optional[Place] = None
    backward: Optional[Place] = None
    terms: Tuple[str, ...] = ()
    losses: Dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""
    parameters: Tuple[str, ...] = ()
    inputs: Tuple[str, ...] = ()
    note: str = ""

    @property
    def found(self):
        """Whether anything was not finite."""
        return bool(self.micro_batch or self.parameters or self.inputs)

    def describe(self):
        """One line for people."""
        parts = []
        if self.inputs:
            parts.append(f"inputs that are not finite: {_listed(self.inputs)}")
        if self.parameters:
            parts.append(f"parameters that are not finite: {_listed(self.parameters)}")
        if self.forward:
            parts.append(f"first module whose output is not finite: {self.forward.describe()}")
        if self.backward:
            parts.append(f"first module, in backward order, whose gradient is not finite: {self.backward.describe()}")
        if self.terms:
            parts.append(f"loss terms: {', '.join(self.terms)}")
        if self.failure:
            parts.append(f"the forward pass raised: {self.failure.rstrip('.')}")
        if not self.found:
            parts.append(f"everything was finite when the batch was replayed in {self.precision}")
        if self.note:
            parts.append(self.note)
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    @property
    def advice(self):
        """What to try next, or ""."""
        if self.inputs:
            return "Look at these images and their annotations, and at what the data mapper does to them."
        if self.parameters:
            return "The weights are damaged: check MODEL.WEIGHTS, or go on from an earlier checkpoint."
        place = self.forward or self.backward
        if place and place.dtype == "float16" and self.precision == "fp16":  # bf16 has the range of fp32
            pattern = place.module or place.before
            if pattern:
                return f"Keep {pattern} in fp32: SOLVER.AMP.FP32_MODULES (train.amp.fp32_modules) ['{pattern}']."
        if self.terms and not self.failure:
            return f"Look at how {', '.join(self.terms)} is computed: a division, logarithm or root of 0, or an overflow."
        return ""

    def as_dict(self):
        """Plain types only, which JSON can hold: numbers that are not finite are strings."""
        values = dataclasses.asdict(self)
        values["losses"] = {name: jsonable(value) for name, value in self.losses.items()}
        return {**values, "found": self.found, "description": self.describe()}


def jsonable(number):
    return number if math.isfinite(number) else str(number)


def _listed(names, most=4):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
