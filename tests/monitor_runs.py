"""What the tests of the monitor share: a loop with the monitor's hooks on a tiny model, and a count of device reads."""

import torch
from conftest import TinyModel, tiny_data
from detectron2.engine import HookBase, SimpleTrainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions
from d2amp_ext.monitor import make_monitor_hooks


def tiny_trainer(precision="fp32", data=None, model=None, lr=0.1, scale=None):
    """A trainer of a TinyModel; Detectron2's SimpleTrainer for "off"."""
    model = TinyModel() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = tiny_data(60) if data is None else data
    if precision == "off":
        return SimpleTrainer(model, data, optimizer)
    scaler = ScalerOptions(init_scale=scale) if scale else ScalerOptions()
    return AMPTrainer(model, data, optimizer, policy=PrecisionPolicy(precision, scaler=scaler))


def policy_of(trainer):
    return getattr(trainer, "policy", None) or PrecisionPolicy("off").resolve("cpu")


def watched(trainer, period=5, steps=10, hooks=(), start=0, **options):
    """Trains with the monitor. Returns the trainer; its storage holds what was written."""
    options = {"period": period, "images_per_step": 4, **options}
    monitor = make_monitor_hooks(policy_of(trainer), trainer.model, trainer.optimizer, **options)
    trainer.register_hooks([*monitor, *hooks])
    trainer.max_iter = steps
    trainer.train(start, steps)
    return trainer


def history(trainer, name):
    """[(value, iteration)] of a scalar, [] when it was never written."""
    histories = trainer.storage.histories()
    return histories[name].values() if name in histories else []


def latest(trainer, name):
    return history(trainer, name)[-1][0]


class Note(HookBase):
    """Calls a function of the trainer at one point of every step."""

    def __init__(self, function, when="after_step"):
        setattr(self, when, lambda: function(self.trainer))


class Reads(TorchDispatchMode):
    """Counts what waits for a value of a tensor while it is active."""

    WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal", "unique_consecutive"}

    def __init__(self):
        super().__init__()
        self.count = self.operators = 0
        outer = self

        class Methods(TorchFunctionMode):  # these dispatch nothing on a CPU
            def __torch_function__(self, func, types, args=(), kwargs=None):
                outer.count += getattr(func, "__name__", "") in ("tolist", "cpu", "numpy", "__array__")
                with torch._C.DisableTorchFunction():
                    return func(*args, **(kwargs or {}))

        self._methods = Methods()

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._methods.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        self.count += func._schema.name.split("::")[1] in self.WAITING
        return func(*args, **(kwargs or {}))


def reads_of_steps(trainer, steps=10, **options):
    """Device reads and operators of every step, from before_step to after_step of all hooks: [(reads, operators)]."""
    counts = []

    class Counting(HookBase):
        def before_step(self):
            self.mode = Reads()
            self.mode.__enter__()

        def after_step(self):
            self.mode.__exit__(None, None, None)
            counts.append((self.mode.count, self.mode.operators))

    counting = Counting()
    if options.get("period"):
        monitor = make_monitor_hooks(policy_of(trainer), trainer.model, trainer.optimizer, images_per_step=4, **options)
    else:
        monitor = []
    trainer.register_hooks([Before(counting), *monitor, After(counting)])
    trainer.max_iter = steps
    trainer.train(0, steps)
    return counts


class Before(HookBase):
    def __init__(self, hook):
        self.before_step = hook.before_step


class After(HookBase):
    def __init__(self, hook):
        self.after_step = hook.after_step
