"""The arithmetic of one training step, counted once by the operators that run."""

from detectron2.engine import HookBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

FIRST = 2  # steps of a run before the counted one: those that warm up are slow already


class FlopCounter(TorchDispatchMode):
    """Adds up the operations (2 per multiply-add) of what runs inside, with torch's formulas. Changes nothing that runs.

    torch's own FlopCounterMode uses the same formulas, but puts hooks on all modules.
    """

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


class FlopMeter(HookBase):
    """Counts one step, forward and backward, of this rank.

    Attributes:
        flops (int or None): of that step; None before it.
    """

    def __init__(self):
        self.flops = None
        self._steps = 0
        self._counter = None

    def before_step(self):
        self._steps += 1
        if self.flops is None and self._steps > FIRST:
            self._counter = FlopCounter()
            self._counter.__enter__()

    def after_step(self):
        record = getattr(self.trainer, "last_step", None)
        complete = record is None or record.cause not in ("forward", "no_gradient")
        total = self._leave()
        if total and complete:
            self.flops = total

    def after_train(self):
        self._leave()  # when the counted step raised

    def _leave(self):
        counter, self._counter = self._counter, None
        if counter is None:
            return None
        counter.__exit__(None, None, None)
        return counter.total
