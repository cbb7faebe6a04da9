"""The contract as a later version might have it, and messages of that version.

In it every enum has one value more, every oneof one member more, and every message one field more.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from octavo.v1 import common_pb2, generation_pb2, operations_pb2, planlog_pb2, worker_pb2

_M = TypeVar("_M", bound=Message)

VALUE: Final[Any] = 4242
"""The value that each enum has more."""
_FIELD: Final = 15_000
_MEMBER: Final = 16_000
_FieldProto = descriptor_pb2.FieldDescriptorProto


def later(message: _M) -> _M:
    """Return a message as a later version sends it: one field more in it, and in every message inside."""
    grown = _classes[message.DESCRIPTOR.full_name].FromString(message.SerializeToString())
    _fill(grown)
    return _as_received(type(message), grown)


def with_unknown_member(message: _M, oneof: str) -> _M:
    """Return a message of a later version in which a oneof has the member that only that version knows."""
    grown = _classes[message.DESCRIPTOR.full_name].FromString(message.SerializeToString())
    getattr(grown, f"later_{oneof}").what = "something new"
    return _as_received(type(message), grown)


def _as_received(kind: type[_M], grown: Any) -> _M:
    received = kind.FromString(grown.SerializeToString())
    # What we do not know goes on with the message, so to send it by our own stubs changes nothing.
    assert grown == type(grown).FromString(received.SerializeToString())
    return received


def _fill(message: Any) -> None:
    message.later_field.what = "something new"
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is None or inner.name == "LaterThing" or inner.GetOptions().map_entry:
            continue
        for one in [value] if isinstance(value, Message) else value:
            _fill(one)


def _grow_file(module: Any) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    for enum in file.enum_type:
        enum.value.add(name=f"{enum.name.upper()}_LATER", number=VALUE)
    for message in file.message_type:
        _grow_message(message)
    if module is common_pb2:
        thing = file.message_type.add(name="LaterThing")
        thing.field.add(name="what", number=1, type=_FieldProto.TYPE_STRING, label=_FieldProto.LABEL_OPTIONAL)
    elif "octavo/v1/common.proto" not in file.dependency:
        file.dependency.append("octavo/v1/common.proto")
    return file


def _grow_message(message: descriptor_pb2.DescriptorProto) -> None:
    optional = {field.oneof_index for field in message.field if field.proto3_optional}
    _add(message, "later_field", _FIELD)
    for index, oneof in enumerate(message.oneof_decl):
        if index not in optional:
            _add(message, f"later_{oneof.name}", _MEMBER + index).oneof_index = index


def _add(message: descriptor_pb2.DescriptorProto, name: str, number: int) -> _FieldProto:
    return message.field.add(
        name=name,
        number=number,
        type=_FieldProto.TYPE_MESSAGE,
        type_name=".octavo.v1.LaterThing",
        label=_FieldProto.LABEL_OPTIONAL,
    )


def _grow() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    names = []
    for module in (common_pb2, generation_pb2, operations_pb2, worker_pb2, planlog_pb2):
        file = _grow_file(module)
        pool.Add(file)  # type: ignore[no-untyped-call]  # the stubs lag
        names += [f"{file.package}.{message.name}" for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


_classes: Final = _grow()
