"""Models of unedited code: their forward passes run in the precision of their config.

By hooks on the model itself: its type, its attributes, its state_dict and its arguments stay what they are.
"""

import contextlib
import logging
import threading
import weakref

import torch
from torch import nn

from ..errors import UserError
from ..evaluation import to_fp32
from ..numerics.protect import protect
from ..policy import PrecisionPolicy, parse_precision
from ..step import at_work
from . import current, loops

_models = weakref.WeakKeyDictionary()  # model -> handles of its hooks
_thread = threading.local()


class Served:
    """Runs the forward passes of one model in the precision of its config. A copy of the model has a copy of this.

    Attributes:
        source (CfgNode, DictConfig or None): the config that the model was made with. None: the one used last.
        ran (str or None): how its last training forward ran: "trainer" in a step of ours, "policy" in a loop of the
            script's, "own" there under an autocast of the script's.
    """

    def __init__(self, source=None):
        self.source = source
        self.ran = None
        self._resolved = {}
        self._protected = set()

    def __deepcopy__(self, memo):
        return Served(self.source)

    def __reduce__(self):
        return Served, (self.source,)

    def before(self, module, args, kwargs):
        """Forward pre-hook."""
        calls = _calls()
        outermost = not calls
        context = contextlib.ExitStack()
        calls.append([module, context, False])
        if at_work():
            self.ran = "trainer"
        elif outermost and current.installed:
            cfg = current.settings(self.source)
            if cfg is not None and module.training:
                self._enter_training(cfg, module, context)
            elif cfg is not None:
                calls[-1][2] = self._enter_evaluation(cfg, module, context)

    def after(self, module, args, kwargs, output):
        """Forward hook, also called when the forward pass failed."""
        calls = _calls()
        converts = False
        while any(call[0] is module for call in calls):
            last, context, converts = calls.pop()
            context.close()
            if last is module:
                break
        return to_fp32(output) if converts else None

    def _enter_training(self, cfg, module, context):
        if not cfg.SOLVER.AMP.ENABLED:
            loops.release_switches()
            return
        policy = self._policy(PrecisionPolicy.from_cfg(cfg), module, "Precision of training")
        learns, name = torch.is_grad_enabled(), type(module).__name__
        if torch.is_autocast_enabled(torch.device(policy.device).type):
            if learns:
                self.ran = "own"
                current.tell(
                    f"{name} is trained under an autocast of the script's own. It is left alone, and SOLVER.AMP adds "
                    "nothing to it."
                )
            return
        if learns and policy.uses_scaler and not loops.script_scales():
            became = "" if parse_precision(cfg.SOLVER.AMP.PRECISION) == "fp16" else ", which is fp16 on this device,"
            raise UserError(
                f"SOLVER.AMP.PRECISION = {cfg.SOLVER.AMP.PRECISION!r}{became} needs gradients that are scaled, and "
                f"the script trains {name} in a loop of its own without a gradient scaler. Set SOLVER.AMP.PRECISION to "
                "bf16, tf32 or fp32, or call d2amp_ext.amp_step in the loop."
            )
        if learns:
            self.ran = "policy"
            loops.hold_switches(policy)
            current.tell(
                f"The script trains {name} in a loop of its own: its forward pass runs in {policy.precision}. The loop "
                "has no guard: a step that is not finite is not skipped."
            )
        self._protect(policy, module)
        context.enter_context(policy.autocast())

    def _enter_evaluation(self, cfg, module, context):
        if not cfg.TEST.AMP.ENABLED:
            return False
        policy = self._policy(PrecisionPolicy.for_evaluation(cfg), module, "Precision of evaluation")
        self._protect(policy, module)
        context.enter_context(policy.float32_switches())
        context.enter_context(policy.autocast())
        return True

    def _policy(self, policy, module, purpose):
        device = str(next(module.parameters(), torch.zeros(())).device)
        key = policy, device, purpose
        if key not in self._resolved:
            self._resolved[key] = policy.resolve(device, purpose)
        return self._resolved[key]

    def _protect(self, policy, module):
        if policy not in self._protected:
            self._protected.add(policy)
            protect(module, policy)


def _calls():
    """Forward passes of served models that run in this thread: lists of module, context, whether fp32 comes out."""
    if not hasattr(_thread, "calls"):
        _thread.calls = []
    return _thread.calls


def serve(model, source=None):
    """Lets the forward passes of a model run as its config says. Again and again is fine.

    Args:
        model (nn.Module): as it is or in DistributedDataParallel.
        source (CfgNode, DictConfig or None): what it was made with.
    """
    if not isinstance(model, nn.Module):
        return
    model = inside(model)
    known = served(model)
    if known is not None:
        known.source = known.source if known.source is not None else source
        return
    hooks = Served(source)
    _models[model] = (
        model.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True),
        model.register_forward_hook(hooks.after, with_kwargs=True, always_call=True),
    )
    current.touched.add("model")


def inside(model):
    """The model in DistributedDataParallel, or the model itself."""
    return model.module if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else model


def served(model):
    """The Served of a model, or None."""
    owners = (getattr(hook, "__self__", None) for hook in getattr(inside(model), "_forward_pre_hooks", {}).values())
    return next((owner for owner in owners if isinstance(owner, Served)), None)


def served_models():
    return list(_models)


def settings_of(model):
    """The CfgNode of a model's own config, else of the config used last, else None."""
    known = served(model)
    return current.settings(known.source if known else None)


def config_text_of(model):
    """That config as text, and its kind. None where it is a LazyConfig, which by now holds parts of the run."""
    known = served(model)
    source = known.source if known else current.latest()
    return (source.dump(), "yaml") if hasattr(source, "dump") else ("", "")


@contextlib.contextmanager
def serving():
    """A context at whose end models are left as they were found."""
    try:
        yield
    finally:
        for handles in list(_models.values()):
            for handle in handles:
                handle.remove()
        _models.clear()
        for _, context, _ in reversed(_calls()):
            context.close()
        _calls().clear()


class _Entry:
    """An entry of META_ARCH_REGISTRY that serves the models that it makes; in all else the entry itself."""

    def __init__(self, entry):
        self.__dict__.update(entry=entry, __doc__=entry.__doc__)

    def __call__(self, *args, **kwargs):
        source = next((value for value in (*args, *kwargs.values()) if current.is_config(value)), None)
        current.prepare(source)
        model = self.entry(*args, **kwargs)
        serve(model, source)
        return model

    def __getattr__(self, name):
        return getattr(self.entry, name)

    def __eq__(self, other):
        return self.entry == (other.entry if isinstance(other, _Entry) else other)

    def __hash__(self):
        return hash(self.entry)

    def __instancecheck__(self, instance):
        return isinstance(instance, self.entry)

    def __subclasscheck__(self, cls):
        return issubclass(cls, self.entry)

    def __mro_entries__(self, bases):
        return (self.entry,)


def getting_architecture(stock):
    """Of META_ARCH_REGISTRY.get."""
    return lambda name: _Entry(stock(name))


def evaluating(stock):
    """Of DefaultTrainer.test: a model of the script's own making is evaluated in the precision of TEST.AMP, too."""

    def test(cls, cfg, model, evaluators=None):
        current.prepare(cfg)
        serve(model, cfg)
        return stock.__func__(cls, cfg, model, evaluators)

    return classmethod(test)
