"""Prompts of exactly so many tokens, cut out of real text.

A text is cut only where a word begins, blank included: tokenizers split there whatever comes before or
after, so that a piece has the same tokens alone as within the text, and pieces can be put together.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo_lab.command import BenchError
from octavo_lab.datasets.tokenizers import Tokenizer

_PART_CHARS: Final = 8192
"""Text that is tokenized in one call: little enough for services whose context is short."""


def corpus_text() -> str:
    """Return the corpus that comes with Octavo: stories, letters and explanations by the demo model."""
    return lzma.decompress(Path(__file__).with_name("corpus.txt.xz").read_bytes()).decode()


async def open_corpus(tokenizer: Tokenizer, seed: int, text: str | None = None) -> Corpus:
    """Return the corpus, split by a model's tokenizer."""
    text = (corpus_text() if text is None else text).strip()
    starts: list[int] = []
    begin = 0
    while begin < len(text):
        # A part ends where a word begins.
        cuts = (at for at in range(begin + _PART_CHARS, len(text)) if _is_cut(text, at))
        end = next(cuts, len(text))
        pieces = await tokenizer.pieces(text[begin:end])
        starts += [begin + start for start in token_starts(text[begin:end], pieces)]
        begin = end
    return Corpus(text, starts, seed)


class Corpus:
    """A text whose tokens begin at `starts`.

    Windows begin at places drawn by the seed, each used once while there are unused ones, so that
    no two prompts share a prefix.
    """

    def __init__(self, text: str, starts: Sequence[int], seed: int) -> None:
        self.num_tokens = len(starts)
        self._text = text
        self._starts = [*starts, len(text)]
        # Where every character is a token, as with the simulated model's, words mean nothing.
        by_character = self.num_tokens == len(text)
        self._cuts = [index for index, start in enumerate(starts) if by_character or _is_cut(text, start)]
        self._ends = {*self._cuts, self.num_tokens}
        self._rng = random.Random(seed)
        self._unused: list[int] = []

    def window(self, num_tokens: int) -> str:
        """Return text of exactly so many tokens; it begins with a blank, unless it is empty.

        Raises:
            BenchError: the corpus has no such piece.
        """
        if num_tokens <= 0:
            return ""
        if (start := self._take(num_tokens)) is None:
            self._unused = self._rng.sample(self._cuts, len(self._cuts))
            start = self._take(num_tokens)
        if start is None:
            raise BenchError(f"no prompt of {num_tokens} tokens: the corpus has {self.num_tokens}")
        return self._text[self._starts[start] : self._starts[start + num_tokens]]

    def _take(self, num_tokens: int) -> int | None:
        """Return an unused cut that has another one so many tokens later."""
        for index in range(len(self._unused) - 1, -1, -1):
            if self._unused[index] + num_tokens in self._ends:
                return self._unused.pop(index)
        return None


def token_starts(text: str, pieces: Sequence[str]) -> list[int]:
    """Return where in a text each of its tokens begins; blanks between pieces go to the later one.

    Raises:
        BenchError: the pieces are not those of the text.
    """
    starts, at = [], 0
    for piece in pieces:
        starts.append(at)
        bare = piece.strip()
        if text.startswith(piece, at):
            at += len(piece)
        elif bare and "\ufffd" not in bare:
            found = text.find(bare, at)
            if found < 0 or text[at:found].strip():
                raise BenchError(
                    f"the tokenizer's pieces are not those of the text: {piece!r} is not at {at}"
                )
            at = found + len(bare)
    return starts


def _is_cut(text: str, at: int) -> bool:
    """Return whether a word begins there, with a single blank before it."""
    inside = 0 < at < len(text) - 1
    return inside and text[at] == " " and text[at + 1].isalpha() and not text[at - 1].isspace()
