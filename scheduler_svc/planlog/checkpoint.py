"""The whole state of a core as bytes, so that a log that goes on in a new file can be replayed alone.

The bytes are a pickle that may name nothing but the core's own classes, the shared records and
plain containers: reading one runs no code that came with it.
"""

from __future__ import annotations

import io
import pickle
from array import array
from types import MappingProxyType
from typing import Any, Final

from scheduler_svc.core import SchedulerCore

_PACKAGES: Final = ("scheduler_svc.core.", "octavo.protocol.steps", "octavo.sampling")
_CONTAINERS: Final = {
    ("builtins", "dict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("array", "array"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
}
_RECORDING_CORE: Final = ("scheduler_svc.planlog.recording", "RecordingCore")
"""What writes checkpoints; what is loaded is a plain core."""


class CheckpointError(ValueError):
    """Bytes that are no checkpoint of this version's core."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MappingProxyType):
            return dict, (dict(obj),)
        if isinstance(obj, array):
            return array, (obj.typecode, obj.tobytes())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _RECORDING_CORE:
            return SchedulerCore
        known = (module, name) in _CONTAINERS or module.startswith(_PACKAGES)
        found = super().find_class(module, name) if known and "." not in name else None
        if isinstance(found, type):
            return found
        raise CheckpointError(f"a checkpoint may not name {module}.{name}")


def dump(core: SchedulerCore) -> bytes:
    """Return the state of a core; whoever observes it is no part of that."""
    buffer = io.BytesIO()
    observer = core.observer
    core.explain_to(None)
    try:
        _Pickler(buffer, protocol=5).dump(core)
    finally:
        core.explain_to(observer)
    return buffer.getvalue()


def load(data: bytes) -> SchedulerCore:
    """Return a core in the state that was dumped.

    Raises:
        CheckpointError: the bytes are damaged, or another version of the core wrote them.
    """
    try:
        core = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"unreadable checkpoint: {error}") from error
    if not isinstance(core, SchedulerCore):
        raise CheckpointError("a checkpoint holds a core, this one does not")
    return core
