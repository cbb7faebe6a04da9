"""Text that comes in pieces, and what the formats have in common.

A format is written as a generator that reads `Pieces` from left to right and yields where it needs more text
than has come. It decides on nothing before it has seen enough, so the way in which a text is cut into pieces
changes nothing in what is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import Final, TypeVar

from octavo.parsing.events import CallArguments, CallBegun, Content, Event, Reasoning

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work on text that has come; yields to wait for more."""

_CLOSES: Final = {"{": "}", "[": "]", "(": ")"}
_MAX_DEPTH: Final = 128
_MAX_FALSE_STARTS: Final = 16
# Bounded, so that a text which never becomes one is not read again and again.
_HEADER: Final = re.compile(
    r'\{\s{0,64}(?:"type"\s{0,64}:\s{0,64}"function"\s{0,64},\s{0,64})?'
    r'"name"\s{0,64}:\s{0,64}("(?:[^"\\]|\\.){1,256}")\s{0,64},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)


class Balance:
    """Finds the end of a JSON object or list (or of a Python list) in text that comes in pieces."""

    def __init__(self, quotes: str = '"', opened: str = "") -> None:
        """`opened`: brackets that are open before the text begins, outermost first."""
        self._quotes = quotes
        self._due = [_CLOSES[one] for one in opened]
        self._quote = ""
        self._escaped = False
        self.broken = False
        """A bracket closes another one than is open, or they are too deep."""

    def end(self, text: str, start: int = 0) -> int | None:
        """Return where the value ends in a piece, which begins at `start`; None while it goes on."""
        for at in range(start, len(text)):
            character = text[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in _CLOSES:
                self._due.append(_CLOSES[character])
                self.broken = len(self._due) > _MAX_DEPTH
            elif character in "]})":
                self.broken = not self._due or self._due.pop() != character
                if not self._due:
                    return at + 1
            if self.broken:
                return at
        return None


class Pieces:
    """The text of a choice that has come and was not read yet, and the events found so far."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        """`tools`: names that may be called. What calls another one is text."""
        self.tools = tools
        self.rest = ""
        self.ended = False
        self.found: list[Event] = []
        self._gap = ""
        """White space before the marker that was found last."""
        self._has_called = False
        self._false_starts = 0

    # What is found -------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Add an event, unless it says nothing."""
        self._has_called |= isinstance(event, CallBegun)
        if isinstance(event, CallBegun) or event.text:
            self.found.append(event)

    def call(self, name: str, arguments: str) -> None:
        """Add a whole call."""
        self.emit(CallBegun(name))
        self.emit(CallArguments(arguments))

    def give_up(self, marker: str) -> None:
        """A marker that was read began no call: it is text, as it stands."""
        self.emit(Content(self._gap + marker))
        self._false_starts += 1

    # Reading -------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Return the next characters, which have come, and go on behind them."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def starts_with(self, marker: str, *, after_space: bool = False) -> Steps[bool]:
        """Return whether the text goes on with a marker (after white space); reads it then, and only then."""
        while True:
            text = self.rest.lstrip() if after_space else self.rest
            if text.startswith(marker):
                self.rest = text[len(marker) :]
                return True
            if self.ended or not marker.startswith(text):
                return False
            yield

    def skip_space(self) -> Steps[str]:
        """Go on to what is no white space; return what is passed over."""
        passed = ""
        while True:
            rest = self.rest.lstrip()
            passed += self.take(len(self.rest) - len(rest))
            if self.rest or self.ended:
                return passed
            yield

    def until(self, *markers: str, into: Callable[[str], Event] = Content) -> Steps[str]:
        """Pass text on up to the first of some markers. Reads and returns that marker, or "" at the end.

        White space before a marker is not passed on, nor at the end when there was a call. When many markers
        have begun nothing, none is looked for any more: each may have the rest of the text read again.
        """
        if self._false_starts >= _MAX_FALSE_STARTS:
            markers = ("\0",)
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            if found:
                at, _, marker = min(found)
                before = self.take(at)
                self.take(len(marker))
                words = before.rstrip()
                self._gap = before[len(words) :]
                self.emit(into(words))
                return marker
            if self.ended:
                words = self.take(len(self.rest))
                self.emit(into(words.rstrip() if self._has_called else words))
                return ""
            certain = len(self.rest) - max(_overlap(self.rest, marker) for marker in markers)
            self.emit(into(self.take(len(self.rest[:certain].rstrip()))))
            yield

    def up_to(self, marker: str) -> Steps[str | None]:
        """Read a marker and return what comes before it; None, having read nothing, without one."""
        start = 0
        while (at := self.rest.find(marker, start)) < 0:
            if self.ended:
                return None
            start = max(0, len(self.rest) - len(marker))
            yield
        text = self.take(at)
        self.take(len(marker))
        return text

    def value(self, quotes: str = '"') -> Steps[str | None]:
        """Return the list or object that the text begins with, unread; None when it has no end."""
        balance, at = Balance(quotes), 0
        while True:
            end = balance.end(self.rest, at)
            if balance.broken:
                return None
            if end is not None:
                return self.rest[:end]
            if self.ended:
                return None
            at = len(self.rest)
            yield

    # Calls as JSON -------------------------------------------------------------------------------

    def calls(self) -> Steps[bool]:
        """Read a call, or a list of calls, as JSON. False when there is none: nothing was read then."""
        before = yield from self.skip_space()
        is_list = self.rest.startswith("[")
        if is_list:
            before += self.take(1) + (yield from self.skip_space())
        if not (yield from self._call()):
            self.rest = before + self.rest
            return False
        while is_list and (yield from self.starts_with(",", after_space=True)):
            space = yield from self.skip_space()
            if not (yield from self._call()):
                self.rest = f",{space}{self.rest}"
                return True
        if is_list:
            yield from self.starts_with("]", after_space=True)
        return True

    def _call(self) -> Steps[bool]:
        """Read `{"name": ..., "arguments": {...}}`. In this order of members the arguments are passed on as
        they come."""
        if not self.rest.startswith("{"):
            return False
        balance, at = Balance(), 0
        while True:
            header = _HEADER.match(self.rest)
            name = _text(header[1]) if header is not None else None
            if header is not None and name is not None and name in self.tools:
                self.take(header.end())
                self.emit(CallBegun(name))
                yield from self.arguments()
                yield from self._skip_object()
                return True
            end = balance.end(self.rest, at)
            if balance.broken or (end is None and self.ended):
                return False
            if end is not None:
                return self._whole_call(end)
            at = len(self.rest)
            yield

    def arguments(self) -> Steps[None]:
        """Read a JSON object as the arguments of the call that was begun."""
        balance = Balance()
        while True:
            end = balance.end(self.rest)
            self.emit(CallArguments(self.take(len(self.rest) if end is None else end)))
            if end is not None or self.ended:
                return
            yield

    def _skip_object(self) -> Steps[None]:
        """Read the members behind the arguments of a call, and its end."""
        balance = Balance(opened="{")
        while (end := balance.end(self.rest)) is None:
            self.rest = ""
            if self.ended:
                return
            yield
        self.take(end)

    def _whole_call(self, end: int) -> bool:
        try:
            found = json.loads(self.rest[:end])
        except (ValueError, RecursionError):
            return False
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if name not in self.tools or not isinstance(arguments, str) or not _is_object(arguments):
            return False
        self.take(end)
        self.call(name, arguments)
        return True


def think(pieces: Pieces, begin: str, end: str, *, begun: bool) -> Steps[None]:
    """Read the thoughts that a text begins with. `begun`: the prompt ended with their beginning."""
    if begun:
        yield from pieces.starts_with(begin, after_space=True)
    elif not (yield from pieces.starts_with(begin, after_space=True)):
        return
    yield from pieces.skip_space()
    if (yield from pieces.until(end, into=Reasoning)):
        yield from pieces.skip_space()


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def _text(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
