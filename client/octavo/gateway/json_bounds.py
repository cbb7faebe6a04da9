"""Bounds on JSON text, counted while it comes: before an object is made of it, and without one."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

MAX_WEIGHT: Final = 1 << 19
"""Of a body. To parse, check and pass on as much takes some 30 ms, and so long everybody waits."""
MAX_DEPTH: Final = 128
"""Lists and objects in each other."""
# What each part of a body costs, measured with the dearest schemas, in about 60 ns.
_ITEM: Final = 1
_LIST_OR_OBJECT: Final = 8
_NAME: Final = 16
_FRACTION: Final = 16
_DIGITS: Final = 16
"""This many weigh 1."""

_COUNTED: Final = b'",:[]{}.eE0123456789'
_OTHERS: Final = bytes(byte for byte in range(256) if byte not in _COUNTED)
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP: Final = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]


class TooHeavy(Exception):
    """JSON that costs too much to read; the message says why."""


class TooDeep(Exception):
    """JSON that is nested too deeply."""


class JsonScale:
    """Weighs JSON that comes in pieces. What is no JSON at all is found by who parses it."""

    def __init__(self) -> None:
        self._parts = 0
        self._digits = 0
        self.depth = 0
        self._in_text = 0
        """1 while the piece to come begins inside a string."""
        self._escape = b""
        """A backslash that the piece to come goes on from."""

    @property
    def weight(self) -> int:
        """Of what has come."""
        return self._parts + self._digits // _DIGITS

    def add(self, piece: bytes) -> None:
        """Weigh a piece of UTF-8.

        Raises:
            TooHeavy: with it the body is.
            TooDeep: it is.
        """
        # Escapes are pairs, from the left: without pairs of backslashes and without escaped quotes, each
        # quote that is left begins or ends a string. `bytes` does this at some hundred MB a second.
        text = (self._escape + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escape = text[-1:] if text.endswith(b"\\") else b""
        parts = text.translate(None, _OTHERS).split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= (len(parts) - 1) & 1
        self._weigh(outside)
        self._measure(outside.translate(None, _NO_BRACKETS))

    def _weigh(self, outside: bytes) -> None:
        items, names = outside.count(b","), outside.count(b":")
        opened = outside.count(b"[") + outside.count(b"{")
        # The words `true` and `false` have an `e` like large numbers; nobody sends thousands of either.
        fractions = outside.count(b".") + outside.count(b"e") + outside.count(b"E")
        self._parts += _ITEM * items + _NAME * names + _LIST_OR_OBJECT * opened + _FRACTION * fractions
        self._digits += len(outside) - items - names - opened - fractions
        if self.weight > MAX_WEIGHT:
            raise TooHeavy(
                f"the body has too many values: it weighs more than {MAX_WEIGHT}, where an item of a list "
                f"weighs {_ITEM}, a list or an object {_LIST_OR_OBJECT}, a name or a fraction {_NAME}"
            )

    def _measure(self, brackets: bytes) -> None:
        opened = brackets.count(b"[") + brackets.count(b"{")
        deepest = self.depth + opened
        if deepest > MAX_DEPTH:
            deepest = max(accumulate(map(_STEP.__getitem__, brackets), initial=self.depth))
        if deepest > MAX_DEPTH:
            raise TooDeep(f"lists and objects are in each other more than {MAX_DEPTH} deep")
        self.depth += 2 * opened - len(brackets)
