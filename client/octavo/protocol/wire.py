"""Messages as they are on the wire, looked at before anything is made of them.

protobuf makes objects of all that a message holds before anybody can ask how much that is: 16 MiB can be
eight million empty messages. `Scanner` counts first, against `BOUNDS`, and stops at the first excess.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from octavo.protocol.bounds import BOUNDS, MAX_FIELDS

VARINT: Final = 0
DELIMITED: Final = 2
_FIXED: Final = {1: 8, 5: 4}
_HIGH: Final = bytes(range(128, 256))
_LONGEST: Final = 10
"""Bytes of a number."""


class WireError(Exception):
    """A message that is not taken. `field` is the path of what is wrong; empty where it is no message."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field

    def inside(self, outer: str) -> WireError:
        """Return the same of the message that holds this one as a field."""
        return WireError(f"{outer}.{self.field}" if self.field else outer, str(self))


class TooManyFields(WireError):
    """A message with more fields than it may have, or than its reader wanted to look at."""

    def __init__(self, field: str = "", problem: str = f"has more than {MAX_FIELDS} fields") -> None:
        super().__init__(field, problem)

    def inside(self, outer: str) -> WireError:
        """Return the same: it is said of the whole."""
        del outer
        return self


class _Known:
    """What is to be looked at in a field of one number and one wire type."""

    __slots__ = ("apart", "bytes", "count", "inner", "is_list", "name", "packed", "text", "together")

    def __init__(self, field: Any, table: _Table | None, *, packed: bool) -> None:
        bound = BOUNDS.get(f"{field.containing_type.name}.{field.name}")
        self.name = field.name
        self.count = bound.count if bound is not None else None
        self.bytes = bound.bytes if bound is not None else None
        self.inner = table
        self.packed = packed
        self.together = bound is not None and bound.together
        self.is_list = is_repeated(field)
        self.apart = self.is_list and not any(known.together for known in (table or {}).values())
        self.text = field.type == FieldDescriptor.TYPE_STRING


_Table = dict[int, _Known]
_tables: dict[str, _Table] = {}


class Scanner:
    """Checks the bytes of messages of one type against the bounds of their fields."""

    def __init__(self, descriptor: Any) -> None:
        self._table = _table_of(descriptor)

    def check(self, data: bytes, max_fields: int = MAX_FIELDS) -> None:
        """Look at a message; costs about a third of a microsecond for each of its fields.

        Raises:
            TooManyFields: it has more than `max_fields`.
            WireError: a field holds more than its bound, or the bytes are no message.
        """
        self._run(data, max_fields, texts=False)

    def find_not_utf8(self, data: bytes) -> str | None:
        """Return the path of the first text of a checked message that is not UTF-8, if there is one."""
        try:
            self._run(data, MAX_FIELDS, texts=True)
        except WireError as error:
            return error.field or None
        return None

    def _run(self, data: bytes, max_fields: int, *, texts: bool) -> None:
        try:
            _scan(self._table, data, (0, len(data)), {}, max_fields, texts)
        except IndexError:
            raise WireError("", "is cut short") from None


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, wire type and bytes of each field; those of a number are left out.

    Raises:
        WireError: the bytes are no message.
    """
    pos, end = 0, len(data)
    try:
        while pos < end:
            tag, pos = _varint(data, pos)
            kind = tag & 7
            start, pos = _span(data, pos, kind)
            if pos > end:
                raise WireError("", "is cut short")
            yield tag >> 3, kind, data[start:pos] if kind == DELIMITED else b""
    except IndexError:
        raise WireError("", "is cut short") from None


def is_repeated(field: Any) -> bool:
    """Return whether a field is a list or a map."""
    # protobuf 5 has no `is_repeated`, protobuf 7 warns about `label`.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def _scan(  # noqa: PLR0912 - a call for each field would cost as much as the rest
    table: _Table, data: bytes, span: tuple[int, int], counts: dict[_Known, int], left: int, texts: bool
) -> int:
    """Check the fields in a span of `data` and return how many of `left` are left.

    `counts` are the elements of lists so far: of one message, which may come in parts.
    """
    pos, end = span
    while pos < end:
        left -= 1
        if left < 0:
            raise TooManyFields
        tag = data[pos]
        pos += 1
        if tag >= 0x80:
            tag, pos = _varint(data, pos - 1)
        if tag & 7 == DELIMITED:
            size = data[pos]
            pos += 1
            if size >= 0x80:
                size, pos = _varint(data, pos - 1)
            start = pos
            pos += size
        else:
            start, pos = _span(data, pos, tag & 7)
        if pos > end:
            raise WireError("", "is cut short")
        known = table.get(tag)
        if known is None:
            continue
        if known.bytes is not None and pos - start > known.bytes:
            raise WireError(known.name, f"has {pos - start} bytes, more than {known.bytes}")
        if known.is_list:
            _count(known, data, start, pos, counts)
        if known.inner is not None:
            # What is no list may come in parts, which are one message.
            inner_counts = {} if known.apart else counts
            try:
                left = _scan(known.inner, data, (start, pos), inner_counts, left, texts)
            except WireError as error:
                raise error.inside(_path(known, counts)) from None
        elif texts and known.text:
            _check_text(known, data[start:pos], counts)
    return left


def _count(known: _Known, data: bytes, start: int, end: int, counts: dict[_Known, int]) -> None:
    """Count the elements that a field brings."""
    count = 1
    if known.packed:
        count = end - start
        if known.count is not None and known.count < count <= known.count * _LONGEST:
            # Each number ends with the one byte of it that is below 128.
            count = len(data[start:end].translate(None, _HIGH))
    count += counts.get(known, 0)
    counts[known] = count
    if known.count is not None and count > known.count:
        raise WireError(known.name, f"has more than {known.count} entries")


def _check_text(known: _Known, value: bytes, counts: dict[_Known, int]) -> None:
    try:
        value.decode()
    except UnicodeDecodeError:
        raise WireError(_path(known, counts), "is not valid UTF-8") from None


def _path(known: _Known, counts: dict[_Known, int]) -> str:
    return f"{known.name}[{counts[known] - 1}]" if known.is_list else known.name


def _span(data: bytes, pos: int, kind: int) -> tuple[int, int]:
    """Return where the value of a field begins and ends."""
    if kind == VARINT:
        start = pos
        while data[pos] >= 0x80:
            pos += 1
        return start, pos + 1
    if kind == DELIMITED:
        size, pos = _varint(data, pos)
        return pos, pos + size
    if kind in _FIXED:
        return pos, pos + _FIXED[kind]
    raise WireError("", "holds a field of an unknown kind")


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
        if shift > 63:
            raise WireError("", "holds a number that is too long")


def _table_of(descriptor: Any) -> _Table:
    """Return what to look at in a message of this type, by tag."""
    table = _tables.get(descriptor.full_name)
    if table is None:
        table = _tables[descriptor.full_name] = {}
        for field in descriptor.fields:
            message = field.message_type
            # The entries of a map are counted, not looked into: they hold two numbers.
            inner = None if message is None or message.GetOptions().map_entry else _table_of(message)
            scalar = message is None and field.type not in (
                FieldDescriptor.TYPE_STRING,
                FieldDescriptor.TYPE_BYTES,
            )
            if scalar and not is_repeated(field):
                continue
            if scalar:
                # In a list, numbers come packed from all that we know of, but need not.
                table[field.number << 3] = _Known(field, None, packed=False)
            table[field.number << 3 | DELIMITED] = _Known(field, inner, packed=scalar)
    return table
