"""Records whose numbers and texts have the same names in their message: one conversion for all of them."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_R = TypeVar("_R", bound="DataclassInstance")
_M = TypeVar("_M", bound=Message)


def given(message: Message, name: str) -> Any:
    """Return the value of an optional field, or None when it is absent."""
    return getattr(message, name) if message.HasField(name) else None


class Scalars(Generic[_R, _M]):
    """Conversion between a record and its message. Fields that hold records of their own are left out."""

    def __init__(self, record: type[_R], message: type[_M], *but: str) -> None:
        """`but`: the fields that are left out, which are the last ones of the record."""
        self._record = record
        self._message = message
        self._names = tuple(one.name for one in fields(record) if one.name not in but)
        left_out = [one.name for one in fields(record)][len(self._names) :]
        assert set(left_out) == set(but), f"{record.__name__}: {left_out} come last, {but} are left out"
        self._values = attrgetter(*self._names)

    def to_proto(self, record: _R, **others: Any) -> _M:
        """Convert; `others` are the fields that are left out."""
        return self._message(**dict(zip(self._names, self._values(record), strict=True)), **others)

    def from_proto(self, message: _M, **others: Any) -> _R:
        """Convert; `others` are the fields that are left out."""
        return self._record(*self._values(message), **others)
