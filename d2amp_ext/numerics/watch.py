"""Hooks that see where values stop being finite: on modules in a forward pass, on nodes of the graph in a backward one."""

import contextlib
import math
from dataclasses import dataclass
from typing import Optional

import torch

from .finding import Place
from .island import clean_name, stock_class, tensors_in


@dataclass(frozen=True)
class Extent:
    """What the float tensors in nested values hold.

    Attributes:
        kind (str or None): None when all are finite, "NaN", "infinite", or "-infinite" when there is nothing worse than
            minus infinity, which masks are made of.
        largest (float): the largest finite magnitude.
        dtype (str): of the tensor that is not finite.
    """

    kind: Optional[str] = None
    largest: float = 0.0
    dtype: str = ""


_BADNESS = [None, "-infinite", "infinite", "NaN"]


def extent(value):
    """The Extent of nested values; tensors that are not floats count as finite."""
    found = Extent()
    for tensor in tensors_in(value):
        tensor = _comparable(tensor.detach())
        if tensor is None:
            continue
        low, high = torch.stack(torch.aminmax(tensor)).tolist()  # one read; NaN wins in both
        kind = "NaN" if math.isnan(high) else "infinite" if high == math.inf else "-infinite" if low == -math.inf else None
        if kind:
            finite = tensor[torch.isfinite(tensor)]
            low, high = torch.stack(torch.aminmax(finite)).tolist() if finite.numel() else (0.0, 0.0)
        largest = max(found.largest, abs(low), abs(high))
        is_worse = _BADNESS.index(kind) > _BADNESS.index(found.kind)
        dtype = str(tensor.dtype).replace("torch.", "") if is_worse else found.dtype
        found = Extent(kind if is_worse else found.kind, largest, dtype)
    return found


def _comparable(tensor):
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    return tensor.float() if tensor.dtype.itemsize < 2 else tensor


@dataclass
class _Call:
    module: torch.nn.Module
    inputs: Extent

    @property
    def came_in_bad(self):
        return self.inputs.kind not in (None, "-infinite")


class Watch:
    """Watches one forward pass of a model and the backward passes after it.

    Attributes:
        forward (Place or None): the first module, in forward order, whose output was not finite; or the one whose own
            code handed such values to a child.
        backward (Place or None): the first node in backward order that made a gradient that was not finite, and its
            module.
    """

    def __init__(self, model):
        """
        Args:
            model (nn.Module): the modules are known by their names in it.
        """
        self._model = model
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._calls = []
        self._owners = {}  # node of the graph -> the module whose forward made it
        self._watching = False
        self.forward = self.backward = None

    # Forward

    @contextlib.contextmanager
    def watching(self):
        """Around the forward pass. A pass that raises FloatingPointError is blamed on the module that was running."""
        handles = []
        for module in self._names:
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        self._watching = True
        try:
            yield
        except FloatingPointError:
            if self.forward is None and self._calls:
                call = self._calls[-1]
                self.forward = self._place(call.module, Extent("not finite", dtype="what it computed"), call)
            raise
        finally:
            self._watching = False  # activation checkpointing calls modules again in backward
            for handle in handles:
                handle.remove()

    def _enter(self, module, args, kwargs):
        if not self._watching:
            return
        parent = self._calls[-1] if self._calls else None
        call = _Call(module, extent((args, kwargs)))
        self._claim((args, kwargs), parent.module if parent else self._model)
        if self.forward is None and call.came_in_bad and parent and not parent.came_in_bad:
            self.forward = self._place(parent.module, call.inputs, parent, before=self._names[module])
        self._calls.append(call)

    def _leave(self, module, args, kwargs, output):
        if not self._watching:
            return
        call = self._calls.pop()
        while call.module is not module:  # those that raised what was caught above them
            call = self._calls.pop()
        self._claim(output, module)
        if self.forward is None:
            made = extent(output)
            if made.kind:
                self.forward = self._place(module, made, call)

    def _place(self, module, bad, call, **details):
        own = extent(list(module.parameters(recurse=False)))
        return Place(
            self._names[module],
            stock_class(module).__name__,
            bad.kind.lstrip("-"),
            bad.dtype,
            call.inputs.largest,
            own.largest,
            came_in=call.came_in_bad,
            **details,
        )

    # Backward

    def _claim(self, value, module):
        """Notes that the nodes which lead to `value` and belong to nobody yet were made by a module's forward."""
        nodes = [tensor.grad_fn for tensor in tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._owners:
                continue
            self._owners[node] = module
            nodes += [following for following, _ in node.next_functions]

    def follow(self, losses):
        """Hooks the graph of the losses, after a forward pass.

        Args:
            losses (Tensor or nested): with graphs.
        """
        self._claim(losses, self._model)
        for node, module in self._owners.items():
            makers = [self._owners.get(following, module) for following, _ in node.next_functions]
            node.register_hook(self._watcher(node.name(), module, makers))

    def _watcher(self, op, module, makers):
        def watch(made, came_in):
            if self.backward is not None:
                return
            bad = next(((extent(value), maker) for value, maker in zip(made, makers) if extent(value).kind), None)
            if bad:
                found, maker = bad
                before = "" if maker is module else self._names[maker]
                self.backward = self._place(module, found, _Call(module, extent(came_in)), op=op, before=before)

        return watch

    def forget(self):
        """Lets go of the graph."""
        self._owners = {}
