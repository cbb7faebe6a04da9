"""The whole state of a core as a message, so that a log that goes on in a new file can be replayed alone.

What is read is data only: records of the core's own classes are made by name and get their fields, and
nothing that a file names is ever called. `Checkpoint` in planlog.proto has the layout.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from octavo.protocol.steps import KEY_BYTES
from octavo.v1 import planlog_pb2 as pb

from scheduler_svc.core import SchedulerCore

_VERSION: Final = 1
_PACKAGES: Final = ("scheduler_svc.core.", "octavo.protocol.steps.", "octavo.sampling.")
_FIRST_CLASS: Final = 16
_CONSTANTS: Final = (None, False, True)
_TAG_BITS: Final = 3
_MAX_INTEGER: Final = 1 << (64 - _TAG_BITS)

_LISTS: Final[dict[type, int]] = {
    list: pb.CHECKPOINT_KIND_LIST,
    tuple: pb.CHECKPOINT_KIND_TUPLE,
    set: pb.CHECKPOINT_KIND_SET,
    frozenset: pb.CHECKPOINT_KIND_FROZENSET,
}
_MAPPINGS: Final[dict[type, int]] = {
    dict: pb.CHECKPOINT_KIND_DICT,
    MappingProxyType: pb.CHECKPOINT_KIND_DICT,
    OrderedDict: pb.CHECKPOINT_KIND_ORDERED_DICT,
    Counter: pb.CHECKPOINT_KIND_COUNTER,
}
_PACKED: Final[dict[tuple[type, type], int]] = {
    (list, int): pb.CHECKPOINT_KIND_UINT32_LIST,
    (tuple, int): pb.CHECKPOINT_KIND_UINT32_TUPLE,
    (list, bytes): pb.CHECKPOINT_KIND_KEY_LIST,
    (tuple, bytes): pb.CHECKPOINT_KIND_KEY_TUPLE,
}
"""Kinds of lists of token ids and of keys, which are most of a core."""


_EMPTY: Final[dict[int, Callable[[], Any]]] = {
    pb.CHECKPOINT_KIND_LIST: list,
    pb.CHECKPOINT_KIND_SET: set,
    pb.CHECKPOINT_KIND_DICT: dict,
    pb.CHECKPOINT_KIND_ORDERED_DICT: OrderedDict,
    pb.CHECKPOINT_KIND_COUNTER: Counter,
}


class CheckpointError(ValueError):
    """A state that cannot be written, or a message that is no checkpoint of this version's core."""


def dump(core: SchedulerCore) -> pb.Checkpoint:
    """Return the state of a core; whoever observes it is no part of that."""
    observer = core.observer
    core.explain_to(None)
    try:
        return _Writer().write(core)
    finally:
        core.explain_to(observer)


def load(message: pb.Checkpoint) -> SchedulerCore:
    """Return a core in the state that was dumped.

    Raises:
        CheckpointError: the message is damaged, or another version of the core wrote it.
    """
    if message.version != _VERSION:
        raise CheckpointError(f"its checkpoint has layout {message.version}, this version reads {_VERSION}")
    try:
        return _Reader(message).read()
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"damaged checkpoint: {error}") from error


def _fields(cls: type) -> list[str]:
    """Return the slots of a class and its bases, in order; none where records have a dictionary."""
    slots = (base.__dict__.get("__slots__", ()) for base in reversed(cls.__mro__))
    return [name for names in slots for name in ((names,) if isinstance(names, str) else names)]


class _Writer:
    """Numbers each object when it is met first, and writes its values when its turn comes."""

    def __init__(self) -> None:
        self._out = pb.Checkpoint(version=_VERSION)
        self._objects: list[Any] = []
        """Also keeps them alive, so that an id names one object only."""
        self._numbers: dict[int, int] = {}
        self._strings: dict[str, int] = {}
        self._byte_strings: dict[bytes, int] = {}
        self._classes: dict[tuple[type, tuple[str, ...]], int] = {}

    def write(self, core: SchedulerCore) -> pb.Checkpoint:
        self._value(core)
        out = self._out
        written = 0
        while written < len(self._objects):
            kind, values = self._content(self._objects[written])
            out.kinds.append(kind)
            out.sizes.append(len(values))
            out.values.extend(values)
            written += 1
        out.strings.extend(self._strings)
        out.byte_strings.extend(self._byte_strings)
        return out

    def _value(self, value: Any) -> int:
        kind = type(value)
        if kind is int:
            if 0 <= value < _MAX_INTEGER:
                return int(value) << _TAG_BITS | pb.CHECKPOINT_TAG_INTEGER
            return self._string(str(value)) << _TAG_BITS | pb.CHECKPOINT_TAG_OTHER_INTEGER
        if kind is float:
            self._out.floats.append(value)
            return len(self._out.floats) - 1 << _TAG_BITS | pb.CHECKPOINT_TAG_FLOAT
        if kind is bytes:
            number = self._byte_strings.setdefault(value, len(self._byte_strings))
            return number << _TAG_BITS | pb.CHECKPOINT_TAG_BYTES
        if kind is str:
            return self._string(value) << _TAG_BITS | pb.CHECKPOINT_TAG_STRING
        if value is None or kind is bool:
            return _CONSTANTS.index(value) << _TAG_BITS
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number << _TAG_BITS | pb.CHECKPOINT_TAG_OBJECT

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _content(self, value: Any) -> tuple[int, list[int]]:
        """Return an object's kind and its values."""
        kind, of = type(value), self._value
        if kind in _LISTS:
            if (packed := _pack(kind, value)) is not None:
                return packed[0], [of(packed[1])]
            return _LISTS[kind], [of(one) for one in value]
        if kind in _MAPPINGS:
            return _MAPPINGS[kind], [of(part) for item in value.items() for part in item]
        if kind is array:
            numbers = _little_endian(array(value.typecode, value))
            return pb.CHECKPOINT_KIND_UINT32_ARRAY, [of(numbers.tobytes())]
        if kind is deque:
            return pb.CHECKPOINT_KIND_DEQUE, [of(value.maxlen), *(of(one) for one in value)]
        if isinstance(value, enum.Enum):
            return self._class(kind, ()), [of(value.name)]
        if isinstance(value, SchedulerCore):
            # What writes checkpoints has more; what is loaded is a plain core.
            kind = SchedulerCore
        if isinstance(value, tuple):
            state: Mapping[str, Any] = dict(zip(kind._fields, value, strict=True))
        elif names := _fields(kind):
            state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        else:
            state = value.__getstate__() or {}
        return self._class(kind, tuple(state)), [of(part) for part in state.values()]

    def _class(self, cls: type, fields: tuple[str, ...]) -> int:
        known = self._classes.get((cls, fields))
        if known is None:
            name = f"{cls.__module__}.{cls.__qualname__}"
            if not name.startswith(_PACKAGES):
                raise CheckpointError(f"a core holds a {name}, which no checkpoint can")
            known = self._classes[cls, fields] = len(self._classes) + _FIRST_CLASS
            self._out.classes.add(name=name, fields=fields)
        return known


def _pack(kind: type, values: Collection[Any]) -> tuple[int, bytes] | None:
    """Return the kind and the bytes of a list of 32-bit integers or of keys; None of any other."""
    types = set(map(type, values))
    packed = _PACKED.get((kind, types.pop())) if len(types) == 1 else None
    match packed:
        case pb.CHECKPOINT_KIND_UINT32_LIST | pb.CHECKPOINT_KIND_UINT32_TUPLE:
            try:
                return packed, _little_endian(array("I", values)).tobytes()
            except OverflowError:
                return None
        case pb.CHECKPOINT_KIND_KEY_LIST | pb.CHECKPOINT_KIND_KEY_TUPLE:
            if set(map(len, values)) == {KEY_BYTES}:
                return packed, b"".join(values)
    return None


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class _Reader:
    """Makes each object once.

    Those that cannot change later are whole when they are made, what they hold before them. Of the
    others all records get their fields first, and then containers are filled: by then whatever is a key has
    all that its hash needs.
    """

    def __init__(self, message: pb.Checkpoint) -> None:
        self._message = message
        self._floats = list(message.floats)
        self._strings = list(message.strings)
        self._byte_strings = list(message.byte_strings)
        self._classes = [(_find(one.name), list(one.fields)) for one in message.classes]
        self._made: dict[int, Any] = {}
        self._later: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        if len(message.kinds) != len(message.sizes) or sum(message.sizes) != len(message.values):
            raise CheckpointError("damaged checkpoint: its lists do not fit together")
        values, self._contents, start = list(message.values), list[list[int]](), 0
        for size in message.sizes:
            self._contents.append(values[start : start + size])
            start += size

    def read(self) -> SchedulerCore:
        for number in range(len(self._contents)):
            self._object(number)
        for fills in self._later:
            for fill in fills:
                fill()
        core = self._object(0)
        if not isinstance(core, SchedulerCore):
            raise CheckpointError("a checkpoint holds a core, this one does not")
        return core

    def _value(self, value: int) -> Any:
        tag, index = value & ((1 << _TAG_BITS) - 1), value >> _TAG_BITS
        match tag:
            case pb.CHECKPOINT_TAG_UNSPECIFIED:
                return _CONSTANTS[index]
            case pb.CHECKPOINT_TAG_INTEGER:
                return index
            case pb.CHECKPOINT_TAG_OTHER_INTEGER:
                return int(self._strings[index])
            case pb.CHECKPOINT_TAG_FLOAT:
                return self._floats[index]
            case pb.CHECKPOINT_TAG_STRING:
                return self._strings[index]
            case pb.CHECKPOINT_TAG_BYTES:
                return self._byte_strings[index]
            case pb.CHECKPOINT_TAG_OBJECT:
                return self._object(index)
        raise CheckpointError(f"damaged checkpoint: a value has tag {tag}")

    def _object(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._make(self._message.kinds[number], self._contents[number])
        return self._made[number]

    def _make(self, kind: int, content: list[int]) -> Any:
        if kind >= _FIRST_CLASS:
            return self._record(*self._classes[kind - _FIRST_CLASS], content)
        values = map(self._value, content)
        match kind:
            case pb.CHECKPOINT_KIND_TUPLE:
                return tuple(values)
            case pb.CHECKPOINT_KIND_FROZENSET:
                return frozenset(values)
            case pb.CHECKPOINT_KIND_UINT32_LIST:
                return self._unpack(content).tolist()
            case pb.CHECKPOINT_KIND_UINT32_ARRAY:
                return self._unpack(content)
            case pb.CHECKPOINT_KIND_UINT32_TUPLE:
                return tuple(self._unpack(content))
            case pb.CHECKPOINT_KIND_KEY_LIST:
                return self._keys(content)
            case pb.CHECKPOINT_KIND_KEY_TUPLE:
                return tuple(self._keys(content))
        return self._container(kind, values)

    def _container(self, kind: int, values: Iterator[Any]) -> Any:
        """Return a container that is filled later."""
        made: Any
        if kind == pb.CHECKPOINT_KIND_DEQUE:
            made = deque(maxlen=next(values))
        elif kind in _EMPTY:
            made = _EMPTY[kind]()
        else:
            raise CheckpointError(f"damaged checkpoint: an object has kind {kind}")
        if isinstance(made, dict):
            self._later[1].append(lambda: made.update(dict(zip(values, values, strict=True))))
        else:
            self._later[1].append(
                lambda: made.update(values) if isinstance(made, set) else made.extend(values)
            )
        return made

    def _unpack(self, content: list[int]) -> array[int]:
        numbers = array("I")
        numbers.frombytes(self._value(content[0]))
        return _little_endian(numbers)

    def _keys(self, content: list[int]) -> list[bytes]:
        joined: bytes = self._value(content[0])
        return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]

    def _record(self, cls: type, fields: list[str], content: list[int]) -> Any:
        if issubclass(cls, enum.Enum):
            return cls[self._value(content[0])]
        if len(content) != len(fields):
            raise CheckpointError(f"damaged checkpoint: a {cls.__name__} has {len(content)} fields")
        if issubclass(cls, tuple):
            _same_fields(cls, fields, cls._fields)  # type: ignore[attr-defined]
            return tuple.__new__(cls, map(self._value, content))
        if slots := _fields(cls):
            _same_fields(cls, fields, slots)
        made = object.__new__(cls)

        def fill() -> None:
            for name, value in zip(fields, map(self._value, content), strict=True):
                object.__setattr__(made, name, value)

        self._later[0].append(fill)
        return made


def _same_fields(cls: type, written: list[str], known: Iterable[str]) -> None:
    """Raise when a record of another version has other fields than this version's."""
    if differing := set(written) ^ set(known):
        names = ", ".join(sorted(differing))
        raise CheckpointError(f"its checkpoint is of another version: {cls.__name__} differs in {names}")


def _find(name: str) -> type:
    """Return a class of the core, or of the records that it uses; nothing is imported for it."""
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None) if name.startswith(_PACKAGES) else None
    if not isinstance(found, type) or f"{found.__module__}.{found.__qualname__}" != name:
        raise CheckpointError(f"its checkpoint is of another version: there is no {name[:200]}")
    return found
