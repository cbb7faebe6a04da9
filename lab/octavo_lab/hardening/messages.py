"""The worst protobuf messages of a size, built by a program from the descriptors: no RPC can be forgotten."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from octavo import v1
from octavo.protocol.bounds import BOUNDS, FieldBound
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

_VARINT, _FIXED64, _DELIMITED, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
_WIRE_TYPES: Final = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64), _FIXED64),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32), _FIXED32),
    FieldDescriptor.TYPE_STRING: _DELIMITED,
    FieldDescriptor.TYPE_BYTES: _DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: _DELIMITED,
}
_SMALL: Final = {_VARINT: b"\1", _FIXED64: b"\0" * 6 + b"\xf0\x3f", _FIXED32: b"\0\0\x80\x3f"}
"""1, and 1.0."""
_WRONG: Final = {_VARINT: b"\xff" * 9 + b"\1", _FIXED64: b"\xff" * 8, _FIXED32: b"\xff" * 4}
"""-1, and no number."""
_NOT_UTF8: Final = b"\xff"
_DIFFERENT: Final = 50_000
ALLOWED: Final = "as much as may be"
"""In the names of bodies that are within the bounds of their worst field."""

_VALID: Final = {
    kind.DESCRIPTOR.full_name: kind.SerializeToString()
    for kind in (
        pb.GenerateRequest(text="a", request_id="r", sampling=common_pb2.SamplingParams(max_tokens=1)),
        # Choices share what the request has, or multiply it.
        common_pb2.SamplingParams(max_tokens=1, n=128),
        pb.Chat(messages=[common_pb2.ChatMessage(role="user", content="a")]),
        pb.TokenizeRequest(text="a"),
        operations_pb2.PinPrefixRequest(name="p", text="a"),
        # Else it would drain the scheduler.
        operations_pb2.DrainRequest(worker_id="nobody"),
    )
}
"""What comes before the bad part, so that it is looked at: by message, only where nothing will not do."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a service."""

    path: str
    message: Any
    """Descriptor of what it is sent."""


@dataclass(frozen=True, slots=True)
class Body:
    """What to send; built when it is sent."""

    name: str
    build: Callable[[], bytes]


def rpcs() -> list[Rpc]:
    """Return every method of every service of `octavo.v1`."""
    modules = [f"{v1.__name__}.{one.name}" for one in pkgutil.iter_modules(v1.__path__)]
    return [
        Rpc(f"/{service.full_name}/{method.name}", method.input_type)
        for name in modules
        if name.endswith("_pb2")
        for service in import_module(name).DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def worst_messages(message: Any, size: int) -> Iterator[Body]:
    """Yield messages of about `size` bytes that cost a reader most: each list and text, nesting, rubbish."""
    yield Body("garbage", lambda: b"\xff" * size)
    yield Body("length beyond the end", lambda: _tag(1, _DELIMITED) + _varint(size) + b"\0" * (size // 2))
    valid = _VALID.get(message.full_name, b"")
    yield Body("unknown fields", lambda: valid + _repeated(lambda i: _tag(10_000 + i, _VARINT) + b"\1", size))
    yield Body("unknown groups, nested", lambda: _repeated(lambda _: _tag(10_000, _GROUP), size))
    yield from _bodies(message, size, "", _identity)


def _bodies(message: Any, size: int, path: str, wrap: Callable[[bytes], bytes]) -> Iterator[Body]:
    valid = _VALID.get(message.full_name, b"")

    def inside(payload: bytes) -> bytes:
        return wrap(valid + payload)

    singular = [_field(one, _value(one, _SMALL)) for one in message.fields if not is_repeated(one)]
    if singular:
        yield _body(f"{path}*", "each again and again", inside, lambda: _cycle(singular, size))
    for field in message.fields:
        name = f"{path}{field.name}"
        bound = BOUNDS.get(f"{message.name}.{field.name}", FieldBound())
        if is_repeated(field):
            yield from _lists(field, size, name, inside, bound.count)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield from _texts(field, size, name, inside)
            if bound.bytes is not None and bound.bytes < size:
                yield from _texts(field, bound.bytes - 8, f"{name}, {ALLOWED}", inside)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _bodies(field.message_type, size, f"{name}.", _within(field, inside))


def _lists(
    field: Any, size: int, name: str, wrap: Callable[[bytes], bytes], most: int | None
) -> Iterator[Body]:
    """Yield the longest lists of the smallest elements, and those of as many as there may be."""
    wire, is_map = (
        _wire_type(field),
        field.message_type is not None and field.message_type.GetOptions().map_entry,
    )
    for kind, element in _elements(field):
        for end, tail in _tails(field):
            build = _list(field, element, size, tail)
            yield _body(name, f"many {kind}{end}", wrap, build)
        if most is not None:
            yield _body(name, f"{kind}, {ALLOWED}", wrap, _list(field, element, size, b"", most))
    if is_map or wire == _DELIMITED:
        return
    for kind, values in (("small", _SMALL), ("wrong", _WRONG)):
        yield _body(name, f"packed {kind}", wrap, _packed(field, values[wire], size))
        if most is not None:
            allowed = min(size, most * len(values[wire]))
            yield _body(name, f"packed {kind}, {ALLOWED}", wrap, _packed(field, values[wire], allowed))


def _packed(field: Any, value: bytes, size: int) -> Callable[[], bytes]:
    return lambda: _delimited(field.number, value * (size // len(value)))


def _list(
    field: Any, element: Callable[[int], bytes], size: int, tail: bytes, most: int | None = None
) -> Callable[[], bytes]:
    return lambda: _repeated(lambda i: _field(field, element(i)), size, most) + tail


def _elements(field: Any) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """Yield the n-th element of a list, by what its elements are."""
    inner = field.message_type
    if inner is None:
        yield "small", _always(_value(field, _SMALL))
        yield (
            ("empty", _always(b""))
            if _wire_type(field) == _DELIMITED
            else ("wrong", _always(_value(field, _WRONG)))
        )
        return
    yield "empty", _always(b"")
    for kind, values in (("small", _SMALL), ("wrong", _WRONG)):
        yield kind, _always(b"".join(_field(each, _value(each, values)) for each in inner.fields))
    first = inner.fields[0]
    if inner.GetOptions().map_entry and _wire_type(first) == _VARINT:
        yield "different", lambda number: _field(first, _varint(number))
    elif inner.full_name in _VALID and _wire_type(first) == _DELIMITED:
        yield "valid", lambda number: _VALID[inner.full_name] + _field(first, str(number).encode())


def _always(value: bytes) -> Callable[[int], bytes]:
    return lambda _: value


def _tails(field: Any) -> Iterator[tuple[str, bytes]]:
    """Yield nothing, and where a reader would look for it longest, a text that is not UTF-8."""
    yield "", b""
    kinds = (field.type, *(one.type for one in (field.message_type.fields if field.message_type else ())))
    if FieldDescriptor.TYPE_STRING in kinds:
        bad = _NOT_UTF8
        if field.message_type is not None:
            text = next(one for one in field.message_type.fields if one.type == FieldDescriptor.TYPE_STRING)
            bad = _field(text, _NOT_UTF8)
        yield ", then not UTF-8", _field(field, bad)


def _texts(field: Any, size: int, name: str, wrap: Callable[[bytes], bytes]) -> Iterator[Body]:
    texts: dict[str, Callable[[], bytes]] = {
        "long": lambda: b"a" * size,
        "nested": lambda: b"[" * size,
        "not UTF-8 at the end": lambda: b"a" * size + _NOT_UTF8,
    }
    if "json" in field.name or field.name == "structural_tag":
        texts["many elements"] = lambda: b"[" + b"{}," * (size // 3) + b"{}]"
        texts["an object of many elements"] = lambda: b'{"anyOf":[' + b"{}," * (size // 3 - 6) + b"{}]}"
        texts["many keys"] = lambda: b"{" + _repeated(lambda i: b'"%x":0,' % i, size - 20) + b'"":0}'
    for kind, build in texts.items():
        yield _body(name, kind, _within(field, wrap), build)


def _within(field: Any, wrap: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda payload: wrap(_field(field, payload))


# The wire format ---------------------------------------------------------------------------------


def _body(path: str, kind: str, wrap: Callable[[bytes], bytes], build: Callable[[], bytes]) -> Body:
    return Body(f"{path}: {kind}", lambda: wrap(build()))


def _identity(payload: bytes) -> bytes:
    return payload


def _repeated(element: Callable[[int], bytes], size: int, most: int | None = None) -> bytes:
    """Return as many elements as fit, or `most`: different ones up to 50,000, then the same again."""
    one, length, number = [], 0, 0
    while length < size and number < min(_DIFFERENT, most or _DIFFERENT):
        one.append(element(number))
        length += len(one[-1])
        number += 1
    return b"".join(one) * max(1, min(size // length, (most or size) // number))


def _cycle(elements: list[bytes], size: int) -> bytes:
    one = b"".join(elements)
    return one * (size // len(one))


def _field(field: Any, value: bytes) -> bytes:
    wire = _wire_type(field)
    return _delimited(field.number, value) if wire == _DELIMITED else _tag(field.number, wire) + value


def _value(field: Any, values: dict[int, bytes]) -> bytes:
    wire = _wire_type(field)
    if wire != _DELIMITED:
        return values[wire]
    return b"" if field.message_type is not None else b"a"


def _delimited(number: int, payload: bytes) -> bytes:
    return _tag(number, _DELIMITED) + _varint(len(payload)) + payload


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _wire_type(field: Any) -> int:
    return _WIRE_TYPES.get(field.type, _VARINT)


def is_repeated(field: Any) -> bool:
    """Return whether a field is a list or a map."""
    # protobuf 5 has no `is_repeated`, protobuf 7 warns about `label`.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)
