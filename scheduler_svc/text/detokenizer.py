"""From tokens to text, one token at a time: whole characters only, nothing twice, and no stop strings.

Most tokenizers of language models are one of two kinds, for which the text of a token does not depend
on its neighbours: byte-level, and SentencePiece with byte fallback. For these a table of token bytes
and a UTF-8 decoder do the work in a fraction of the time; whatever else comes goes through the
tokenizer's own decoder. The table is made, and checked against the tokenizer, where the tokenizer is
loaded: in a child process (`tokenization.py`).
"""

from __future__ import annotations

import codecs
import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
PROMPT_TAIL: Final = 8
"""Tokens of the prompt that decide how the text goes on after them."""
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """The text of one choice as its tokens come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return what is left at the end: an unfinished character, as the tokenizer decodes it."""


class Detokenizer(Protocol):
    """Makes the text streams of one model."""

    def stream(self, prompt_tail: Sequence[int], *, keep_special: bool) -> TextStream:
        """Return the stream of a text that goes on after a prompt's last tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token, special ones too; it may be a part of a character."""


class TableKind(enum.Enum):
    """How the bytes of tokens become text."""

    BYTE_LEVEL = "byte_level"
    """All bytes are joined before they are decoded."""
    BYTE_FALLBACK = "byte_fallback"
    """Only byte tokens (<0xNN>) are joined; every other token is text of its own."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of every token. Token i has `data[offsets[i]:offsets[i + 1]]`."""

    kind: TableKind
    data: bytes
    offsets: array[int]
    special: frozenset[int]
    """Tokens that are no text unless the client asks for them."""
    byte_tokens: frozenset[int] = field(default_factory=frozenset)
    strips_first_space: bool = False
    """A space at the very start of the text is no part of it (SentencePiece's dummy prefix)."""
    texts: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    """Tokens that have come up and are whole characters in themselves: most of them, most of the time."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not know."""
        offsets = self.offsets
        try:
            return self.data[offsets[token_id] : offsets[token_id + 1]]
        except IndexError:
            return b""

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max((end - start for start, end in pairwise(self.offsets)), default=1)

    def stream(self, prompt_tail: Sequence[int], *, keep_special: bool) -> TextStream:
        """Return the stream of a text that goes on after a prompt."""
        if self.kind is TableKind.BYTE_LEVEL:
            return ByteLevelStream(self, prompt_tail, keep_special=keep_special)
        return ByteFallbackStream(self, prompt_tail, keep_special=keep_special)


class ByteLevelStream:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): text is what the bytes of all tokens decode to."""

    __slots__ = ("_decoder", "_skipped", "_table", "_unfinished")

    def __init__(self, table: TokenTable, prompt_tail: Sequence[int], *, keep_special: bool) -> None:
        self._table = table
        self._skipped: frozenset[int] = frozenset() if keep_special else table.special
        self._decoder = _utf8_decoder("replace")
        self._unfinished = False
        # A prompt may end inside a character that the first tokens complete.
        self.feed(prompt_tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if len(token_ids) == 1:
            return self._feed_one(token_ids[0])
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def _feed_one(self, token_id: int) -> str:
        table, alone = self._table, not self._unfinished
        if alone:
            known = table.texts.get(token_id)
            if known is not None:
                return known
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(table.token_bytes(token_id))
        self._unfinished = bool(self._decoder.getstate()[0])
        if alone and not self._unfinished and token_id not in table.special:
            table.texts[token_id] = text
        return text

    def flush(self) -> str:
        """Return what is left at the end."""
        return self._decoder.decode(b"", True)


class ByteFallbackStream:
    """SentencePiece with byte fallback (Llama 2, Mistral, Gemma).

    A run of byte tokens that is not UTF-8 decodes to one replacement character per byte. Characters
    are given out as soon as they are whole, so a run that turns invalid only later has been shown up
    to there; the tokenizer, which sees the whole run, would have replaced all of it.
    """

    __slots__ = ("_at_start", "_decoder", "_pending", "_skipped", "_table")

    def __init__(self, table: TokenTable, prompt_tail: Sequence[int], *, keep_special: bool) -> None:
        self._table = table
        self._skipped: frozenset[int] = frozenset() if keep_special else table.special
        self._decoder = _utf8_decoder("strict")
        self._pending = 0
        self._at_start = table.strips_first_space
        self.feed(prompt_tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        table, skipped = self._table, self._skipped
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in skipped:
                continue
            data = table.token_bytes(token_id)
            if token_id in table.byte_tokens:
                parts.append(self._feed_byte(data))
            elif data:
                parts += (self._replace_pending(), data.decode())
        text = "".join(parts)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return what is left at the end."""
        return self._replace_pending()

    def _feed_byte(self, byte: bytes) -> str:
        self._pending += 1
        try:
            text = self._decoder.decode(byte)
        except UnicodeDecodeError:
            return self._replace_pending()
        if text:
            self._pending = 0
        return text

    def _replace_pending(self) -> str:
        if not self._pending:
            return ""
        replaced, self._pending = REPLACEMENT * self._pending, 0
        self._decoder.reset()
        return replaced


class Decoder(Protocol):
    """What `WindowStream` needs of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


class WindowStream:
    """Any tokenizer: a window of recent tokens is decoded again with each new one.

    The window is cut only where its text ends in a whole character, so cutting changes nothing that
    was shown. `_shown` counts characters of the window's text.
    """

    __slots__ = ("_decoder", "_shown", "_skipped", "_window")

    _KEEP = 4
    _CUT_AT = 8
    _CUT_ANYWHERE_AT = 64
    # An unfinished character has at most three bytes, each of which may decode to one replacement.
    _UNFINISHED = 3

    def __init__(self, decoder: Decoder, prompt_tail: Sequence[int], skipped: frozenset[int]) -> None:
        self._decoder = decoder
        self._skipped = skipped
        self._window = [token_id for token_id in prompt_tail if token_id not in skipped]
        self._shown = len(self._text()) if self._window else 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._window.extend([token_id for token_id in token_ids if token_id not in self._skipped])
        text = self._text()
        whole = text.rstrip(REPLACEMENT)
        end = max(len(whole), len(text) - self._UNFINISHED)
        size = len(self._window)
        if size >= self._CUT_ANYWHERE_AT:
            end = len(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if end == len(text) and size >= self._CUT_AT:
            self._cut()
        return new

    def flush(self) -> str:
        """Return what is left at the end."""
        text = self._text()
        new, self._shown = text[self._shown :], len(text)
        return new

    def _cut(self) -> None:
        kept = self._window[-self._KEEP :]
        shown = len(self._decode(kept))
        # With nothing before it, the next token would be taken for the first of the text.
        if shown:
            self._window, self._shown = kept, shown

    def _text(self) -> str:
        return self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=False)


class WindowDetokenizer:
    """A detokenizer that asks the tokenizer itself."""

    def __init__(self, decoder: Decoder, special: frozenset[int]) -> None:
        self._decoder = decoder
        self._special = special

    def stream(self, prompt_tail: Sequence[int], *, keep_special: bool) -> TextStream:
        """Return the stream of a text that goes on after a prompt."""
        return WindowStream(self._decoder, prompt_tail, frozenset() if keep_special else self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of a token in the midst of others: decoders may treat the first differently."""
        once, twice = (self._decoder.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :].encode()


def join_table(
    kind: TableKind,
    tokens: Iterable[bytes],
    *,
    special: frozenset[int],
    byte_tokens: frozenset[int] = frozenset(),
    strips_first_space: bool = False,
) -> TokenTable:
    """Return the table of these tokens, in the order of their ids."""
    data = bytearray()
    offsets = array("I", [0])
    for token in tokens:
        data += token
        offsets.append(len(data))
    return TokenTable(kind, bytes(data), offsets, special, byte_tokens, strips_first_space)


# Stop strings


class StopStrings:
    """The stop strings of a request, prepared once and shared by its choices."""

    __slots__ = ("_fallbacks", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.first_characters = frozenset(string[0] for string in self.strings)
        self._fallbacks = tuple(_fallbacks(string) for string in self.strings)

    def advance(self, index: int, matched: int, character: str) -> int:
        """Return how much of string `index` the text ends with, after `character` (Knuth-Morris-Pratt)."""
        string, fallbacks = self.strings[index], self._fallbacks[index]
        while matched and string[matched] != character:
            matched = fallbacks[matched - 1]
        return matched + 1 if string[matched] == character else 0


def _fallbacks(string: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = table[length - 1]
        if string[length] == character:
            length += 1
        table.append(length)
    return table


class StopMatcher:
    """Where one choice's text stands between the stop strings."""

    __slots__ = ("_held", "_matched", "_shows_stop", "_stops", "stopped_by")

    def __init__(self, stops: StopStrings, *, shows_stop: bool = False) -> None:
        """`shows_stop`: what is shown ends with the stop string."""
        self._stops = stops
        self._shows_stop = shows_stop
        self._matched = [0] * len(stops.strings)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text. Of several that end together, the longest."""

    def feed(self, text: str) -> str:
        """Return what may be shown now; the rest is held back while it may belong to a stop string.

        Once `stopped_by` is set, what was returned is all that is ever shown.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text
        stops, matched = self._stops, self._matched
        for position, character in enumerate(text):
            ended: str | None = None
            for index, string in enumerate(stops.strings):
                progress = stops.advance(index, matched[index], character)
                if progress == len(string):
                    if ended is None or len(string) > len(ended):
                        ended = string
                    progress = 0
                matched[index] = progress
            if ended is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                self.stopped_by = ended
                return seen if self._shows_stop else seen[: len(seen) - len(ended)]
        seen = self._held + text
        shown = len(seen) - max(matched)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
