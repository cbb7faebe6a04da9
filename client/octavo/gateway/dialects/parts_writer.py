"""Answers that are a list of parts: thoughts, words and calls, each with a beginning and an end."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.gateway.chat_writer import call_id
from octavo.gateway.writers import Head, Writer, encoded_lines, to_json
from octavo.parsing.events import CallArguments, CallBegun, Content, Event, Reasoning
from octavo.parsing.output import OutputForm, OutputParser
from octavo.types import Choice, GenerateResult, Progress, Usage


@dataclass(slots=True)
class OpenPart:
    """A part as far as it has come. `text` is the arguments of a call."""

    index: int
    kind: type[Content | Reasoning | CallBegun]
    id: str
    """Of a call: what its result will name."""
    name: str = ""
    text: str = ""


def named_event(value: dict[str, Any]) -> bytes:
    """Return an event of a stream that carries its type beside the data as well."""
    data = encoded_lines(to_json(value).decode())
    return f"event: {value['type']}\ndata: ".encode() + data + b"\n\n"


class PartsWriter(Writer):
    """Writes the one choice of a request."""

    def __init__(self, head: Head, form: OutputForm) -> None:
        self._head = head
        self._form = form
        self._parser: OutputParser | None = None
        self._parts: list[OpenPart] = []
        self._is_open = False
        """The last part goes on."""
        self._choice: Choice | None = None

    # Events --------------------------------------------------------------------------------------

    def events(
        self, progress: Progress, first_choice: int, prompt_tokens: int, *, in_reasoning: bool = False
    ) -> bytes:
        """Return the events for what came."""
        del first_choice
        written: list[bytes] = []
        if self._parser is None:
            self._parser = OutputParser(self._form, in_reasoning=in_reasoning)
            written.append(self._start(prompt_tokens))
        for delta in progress.deltas:
            written += self._take(self._parser.feed(delta.text))
        for choice in progress.ended:
            self._choice = choice
            written += self._take(self._parser.close())
            written += self._end_part()
        return b"".join(written)

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events that end a stream."""
        assert self._choice is not None
        return self._finish(self._choice, usages[0])

    def _take(self, events: Iterable[Event]) -> Iterable[bytes]:
        for event in events:
            kind = CallBegun if isinstance(event, CallArguments) else type(event)
            if not self._is_open or isinstance(event, CallBegun) or self._parts[-1].kind is not kind:
                yield from self._end_part()
                yield self._begin_part(kind, event.name if isinstance(event, CallBegun) else "")
            if not isinstance(event, CallBegun):
                self._parts[-1].text += event.text
                yield self._piece(self._parts[-1], event.text)

    def _begin_part(self, kind: type[Content | Reasoning | CallBegun], name: str = "") -> bytes:
        own = call_id(self._form) if kind is CallBegun else secrets.token_hex(12)
        part = OpenPart(len(self._parts), kind, own, name)
        self._parts.append(part)
        self._is_open = True
        return self._opened(part)

    def _end_part(self) -> Iterable[bytes]:
        if self._is_open:
            self._is_open = False
            yield self._closed(self._parts[-1])

    @abstractmethod
    def _start(self, prompt_tokens: int) -> bytes:
        """Return the events that begin a stream."""

    @abstractmethod
    def _opened(self, part: OpenPart) -> bytes:
        """Return the events that begin a part."""

    @abstractmethod
    def _piece(self, part: OpenPart, text: str) -> bytes:
        """Return the event for a piece of a part."""

    @abstractmethod
    def _closed(self, part: OpenPart) -> bytes:
        """Return the events that end a part."""

    @abstractmethod
    def _finish(self, choice: Choice, usage: Usage) -> bytes:
        """Return the events behind the last part."""

    # Whole answers -------------------------------------------------------------------------------

    def whole(self, results: Sequence[GenerateResult]) -> bytes:
        """Return an answer: what the events would have come to."""
        result, choice = results[0], results[0].choices[0]
        parser = OutputParser(self._form, in_reasoning=result.in_reasoning)
        for _ in self._take([*parser.feed(choice.text), *parser.close()]):
            pass
        return to_json(self._answer(choice, result.usage))

    @abstractmethod
    def _answer(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        """Return the whole answer, of the parts that there are."""
