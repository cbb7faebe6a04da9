"""What is wanted of a library of grammars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from octavo.sampling import StructuredOutput

WORD_BITS: Final = 32
_MAX_PROBLEM: Final = 200
"""Libraries quote the whole grammar."""
Mask = npt.NDArray[np.int32]
"""One bit per token of the vocabulary, lowest first: set where the token is allowed."""


def allowed_ids(mask: Mask) -> npt.NDArray[np.int64]:
    """Return the ids of the tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def is_allowed(mask: Mask, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token_id // WORD_BITS] >> (token_id % WORD_BITS) & 1)


class GrammarError(Exception):
    """A constraint cannot be compiled, or a sequence cannot go on under it; the message says why."""

    def __init__(self, problem: str) -> None:
        line = " ".join(problem.split())
        super().__init__(line if len(line) <= _MAX_PROBLEM else f"{line[:_MAX_PROBLEM]}…")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as its tokenizer.json has them."""

    tokenizer_json: str
    size: int
    """Of the model's logits, which may be more than the tokenizer has."""
    stop_token_ids: tuple[int, ...]


class Matcher(Protocol):
    """How far one output is in a grammar. Used by one thread at a time."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; return whether the grammar allows it."""

    def fill(self, mask: Mask) -> None:
        """Say which tokens are allowed now: stop tokens where the output may end."""


class CompiledGrammar(Protocol):
    """A grammar over the model's vocabulary."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""

    def matcher(self, stop_token_ids: Iterable[int]) -> Matcher:
        """Return the beginning of an output that ends by one of these tokens."""


class GrammarBackend(Protocol):
    """Compiles constraints. Calls may take long, and may be made from any thread."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens over which it compiles."""

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Compile a constraint.

        Raises:
            GrammarError: it is wrong, or too large.
        """

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        """Return a compiled grammar for another process."""

    def deserialize(self, data: bytes) -> CompiledGrammar:
        """Return the grammar that another process has compiled for the same vocabulary."""
