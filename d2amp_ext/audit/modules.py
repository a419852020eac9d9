"""Modules ranked by the error that they add themselves.

The model runs in the audited precision. Each time a module is done, its own code is run once more in fp32: on the inputs
that it had, and with what the modules that it called had answered. What differs then, in its output or in what it hands
to another module, is its own. Neither errors that came in nor those of the modules inside count, so that every error is
counted once, where it is made: for a convolution that is its arithmetic, for a module such as StandardROIHeads what its
own lines do between the calls. What goes to a normalization layer is compared behind it: 100.1 and 100.3 are nearly the
same, and are lost to a layer that takes the mean away when both are 100. Methods that the shield knows by name
(`inference`, `predict_boxes`, `losses` ...) count as modules of their own.
"""

import contextlib
import logging
import math
from dataclasses import dataclass, field
from typing import Any, List

import torch

from .. import random_state
from ..numerics.apart import apart
from ..numerics.island import active_autocast, autocast_off, stock_class, tensors_in
from ..numerics.watch import extent
from .compare import box_error, error_between
from .pieces import UNKNOWN, copied, exchanged, lifted, pieces
from .training import is_of_the_precision

logger = logging.getLogger(__name__)

_GIVE_BOXES = ("apply_deltas", "predict_boxes", "predict_boxes_for_gt_classes")


@dataclass
class Added:
    """What a module adds.

    Attributes:
        name (str): qualified; "" is the model itself.
        method (str): of the module, where it is not `forward`.
        cls (str): its class.
        error (float): the largest of its calls, as `error_between` measures it; infinite where its output
            was not finite, or there was none because it raised.
        dtype (str): of its outputs, such as "bfloat16"; "" where it has no floats.
        largest (float): the largest finite magnitude of its outputs.
        mode (str): "training" or "evaluation".
        calls (int): how often it was called.
        caller (str): the name of the module whose code called it first.
        order (int): its place in the order in which modules were done.
    """

    name: str
    method: str
    cls: str
    error: float = 0.0
    dtype: str = ""
    largest: float = 0.0
    mode: str = ""
    calls: int = 0
    caller: str = ""
    order: int = 0

    @property
    def label(self):
        return ".".join(filter(None, [self.name, self.method])) or "(the model)"


def rank(model, reference, policy, fp32, batch, random, training):
    """Runs one forward pass and measures every module.

    Args:
        model (nn.Module): protected as the policy says.
        reference (nn.Module): the same model, not protected.
        policy (PrecisionPolicy): resolved.
        fp32 (PrecisionPolicy): resolved, in fp32.
        batch (list): what the model takes.
        random (dict): a state of `random_state.capture`.
        training (bool): in training mode or in evaluation mode.

    Returns:
        list[Added]: the largest errors first, in the order of calls where they are equal.
    """
    tracer = _Tracer(reference, fp32, "training" if training else "evaluation")
    with apart(model, random), apart(reference), torch.no_grad():
        for each in (model, reference):
            each.train(training)
        with tracer.watching(model), policy.float32_switches(), policy.autocast():
            try:
                model(batch)
            except Exception as error:  # what was called until then is measured
                if not is_of_the_precision(error):
                    raise
    return sorted(tracer.added.values(), key=lambda added: (-added.error, added.order))


class _Diverged(Exception):
    """In fp32 the code goes another way, so that there are no answers to give it."""


@dataclass
class _Call:
    key: tuple
    inputs: Any
    random: tuple
    answers: List[tuple] = field(default_factory=list)  # (key, inputs, output, random state after it)


class _Tracer:
    """Watches one forward pass of a model, with a twin of it for the replays."""

    def __init__(self, reference, fp32, mode):
        self.added = {}
        self._reference, self._fp32, self._mode = reference, fp32, mode
        self._originals, self._norms = {}, set()
        self._stack = []
        self._done, self._raised = 0, None
        self._answers = None  # of the replay that is under way
        self._handed = 0.0  # the error in what it hands to other modules
        self._last = (None, None, None)  # the module that was done last, its output and what that would be in fp32

    @contextlib.contextmanager
    def watching(self, model):
        twins = {key: (owner, attribute) for key, owner, attribute in pieces(self._reference)}
        with contextlib.ExitStack() as stack:
            for key, owner, attribute in pieces(model):
                if key not in twins:
                    continue
                twin, _ = twins[key]
                self.added[key] = Added(*key, stock_class(owner).__name__, mode=self._mode)
                self._originals[key] = getattr(twin, attribute)
                if "Norm" in self.added[key].cls and not any(True for _ in twin.children()):
                    self._norms.add(key)
                stack.enter_context(exchanged(twin, attribute, self._answering(key)))
                stack.enter_context(exchanged(owner, attribute, self._measured(key, getattr(owner, attribute))))
            yield
        self.added = {key: added for key, added in self.added.items() if added.calls}

    def _measured(self, key, original):
        def call(*args, **kwargs):
            if self._answers is not None:  # an object that both models share
                return self._originals[key](*args, **kwargs)
            self._look_back(key, args)
            depth = len(self._stack)
            self._stack.append(_Call(key, copied((args, kwargs)), random_state.snapshot()))
            try:
                output = original(*args, **kwargs)
            except Exception as error:
                self._blame(key, error)
                raise
            finally:
                call = self._stack[depth]
                del self._stack[depth:]
            after = random_state.snapshot()
            self._measure(call, output)
            random_state.restore(random_state.plain(after))
            if self._stack:
                self._stack[-1].answers.append((key, call.inputs, copied(output), after))
            return output

        return call

    def _answering(self, key):
        def call(*args, **kwargs):
            if self._answers is None:
                return self._originals[key](*args, **kwargs)
            if not self._answers or self._answers[0][0] != key or any(part is UNKNOWN for part in self._answers[0]):
                raise _Diverged
            _, inputs, output, after = self._answers.pop(0)
            self._handed = max(self._handed, self._handed_error(key, inputs, (args, kwargs)))
            random_state.restore(random_state.plain(after))
            return lifted(output)

        return call

    def _blame(self, key, error):
        """The innermost module that raised is the one that cannot do it. FloatingPointError has its cause before."""
        if isinstance(error, RuntimeError) and self._raised is not error:
            self._raised = error
            self._count(key).error = math.inf

    def _count(self, key):
        added = self.added[key]
        if not added.calls:
            added.caller = self._stack[-1].key[0] if self._stack else ""
            added.order = self._done = self._done + 1
        added.calls += 1
        return added

    def _measure(self, call, output):
        added = self._count(call.key)
        added.largest = max(added.largest, extent(output).largest)
        added.dtype = next((_name(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()), added.dtype)
        if call.inputs is UNKNOWN or extent(call.inputs).kind in ("NaN", "infinite"):
            return
        try:
            wanted = self._replay(call)
        except Exception as error:  # of code that cannot do without what was not recorded
            logger.debug(f"{added.label} was not measured: {type(error).__name__}: {error}")
            return
        added.error = max(added.error, self._handed, _error(added, output, wanted))
        self._last = (added, output, wanted)

    def _look_back(self, key, args):
        """A normalization layer is called: what was made just before is compared behind it."""
        added, output, wanted = self._last
        if added is not None and args and args[0] is output and key in self._norms:
            added.error = max(added.error, self._handed_error(key, ((output,), {}), ((wanted,), {})))

    def _handed_error(self, key, found, wanted):
        """The error in the (args, kwargs) of a call: of a normalization layer, in what comes out of it."""
        if key in self._norms:
            answers, self._answers = self._answers, None
            try:
                with autocast_off(active_autocast(found)):
                    found, wanted = (self._originals[key](*side[0], **side[1]) for side in map(lifted, (found, wanted)))
            except Exception as error:  # one that needs other processes, for example
                logger.debug(f"{self.added[key].label} could not be asked: {type(error).__name__}: {error}")
            finally:
                self._answers = answers
        return error_between(found, wanted)

    def _replay(self, call):
        args, kwargs = lifted(call.inputs)  # who called it is still to compare what it handed over
        self._answers, self._handed = list(call.answers), 0.0
        random_state.restore(random_state.plain(call.random))
        try:
            with autocast_off(active_autocast(args, kwargs)), self._fp32.float32_switches():
                return self._originals[call.key](*args, **kwargs)
        finally:
            self._answers = None


def _error(added, output, wanted):
    if added.method.rpartition(".")[2] in _GIVE_BOXES:
        size = 5 if "Rotated" in added.cls else 4
        output, wanted = ([piece.reshape(-1, size) for piece in tensors_in(side)] for side in (output, wanted))
        if len(output) == len(wanted):
            return max((box_error(*pair) for pair in zip(output, wanted)), default=0.0)
    return error_between(output, wanted)


def _name(tensor):
    return str(tensor.dtype).replace("torch.", "")
