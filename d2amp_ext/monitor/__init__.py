"""The room of the monitor: what the precision does, as scalars of the EventStorage and in TensorBoard."""

from .build import build_monitor_hooks, make_monitor_hooks, place, writers_of  # noqa: F401
