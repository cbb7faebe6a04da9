"""What keeps the output of one sequence within its grammar."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

import numpy as np
from octavo.sampling import StructuredOutput

from worker_svc.grammar.backend import WORD_BITS, CompiledGrammar, GrammarError, Mask, Matcher, Vocabulary
from worker_svc.grammar.backends import Backends
from worker_svc.grammar.compiler import CompilerChild, GrammarCompiler
from worker_svc.grammar.threads import Threads

_PATIENCE_S: Final = 0.005
"""So long a computed step waits for masks when others are in it, who have none to wait for,"""
_PATIENCE_ALONE_S: Final = 1.0
"""and when there are none."""
MASK_LIMIT_S: Final = 5.0
"""A sequence whose mask takes longer is at an end. Nothing stops the thread that makes it."""
_MASK_THREADS: Final = max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class Output:
    """What there is of an output, and what may end it."""

    token_ids: Seq[int]
    stop_token_ids: Collection[int]
    min_tokens: int = 0
    """No end before it has so many, unless the grammar allows nothing else."""


class Guide:
    """Says which tokens a sequence may go on with.

    A function of the grammar and of the output so far, so a sequence that comes from elsewhere begins
    with what it has. Masks are made by other threads, one ahead: while the engine computes a step, its
    masks are on their way.
    """

    def __init__(self, grammar: Future[CompiledGrammar], output: Output, vocab_size: int, makers: Makers):
        self.missed = False
        """The last step could not wait for the mask."""
        self._makers = makers
        self._num_words = -(-vocab_size // WORD_BITS)
        self._beyond = np.arange(vocab_size, self._num_words * WORD_BITS)
        """Bits of the last word that are nobody's."""
        self._stops = np.array([s for s in sorted(output.stop_token_ids) if s < vocab_size], dtype=np.int64)
        self._stop_token_ids = tuple(self._stops.tolist())
        self._min_tokens = output.min_tokens
        self._num_tokens = 0
        self._matcher: Matcher | None = None
        self._mask: Future[Mask] = Future()
        token_ids = tuple(output.token_ids)
        self._threads = makers.beginnings
        self._began_at: float | None = None
        """When a thread began to make the mask that comes next."""
        grammar.add_done_callback(lambda done: makers.beginnings.submit(self._begin, done, token_ids))

    @property
    def ready(self) -> bool:
        """Whether it is known what the next token may be."""
        return self._mask.done() and self._mask.exception() is None

    @property
    def problem(self) -> str | None:
        """Why the sequence cannot go on, or None."""
        if not self._mask.done():
            return self._lost()
        error = self._mask.exception()
        if error is None or isinstance(error, GrammarError):
            return None if error is None else str(error)
        return f"the grammar fails: {error!r}"

    def _lost(self) -> str | None:
        began_at = self._began_at
        if began_at is None or time.monotonic() < began_at + MASK_LIMIT_S:
            return None
        self._threads.replace_lost()
        return f"what may follow token {self._num_tokens} takes longer than {MASK_LIMIT_S:g} s to find"

    @property
    def mask(self) -> Mask:
        """The tokens that may come next; only when `ready`."""
        return self._mask.result()

    def advance(self, token_id: int) -> None:
        """Go on by the token that was sampled under the mask."""
        self._threads = self._makers.masks
        self._began_at = None
        self._mask = self._threads.submit(self._next, token_id)

    def _begin(self, grammar: Future[CompiledGrammar], token_ids: Seq[int]) -> None:
        self._began_at = time.monotonic()
        try:
            self._matcher = grammar.result().matcher(self._stop_token_ids)
            for token_id in token_ids:
                self._accept(token_id)
            self._mask.set_result(self._fill())
        except Exception as error:  # noqa: BLE001 - it is told as the sequence's problem
            self._mask.set_exception(error)

    def _next(self, token_id: int) -> Mask:
        self._began_at = time.monotonic()
        self._accept(token_id)
        return self._fill()

    def _accept(self, token_id: int) -> None:
        assert self._matcher is not None
        if not self._matcher.accept(token_id):
            raise GrammarError(f"output token {self._num_tokens} ({token_id}) does not follow the grammar")
        self._num_tokens += 1

    def _fill(self) -> Mask:
        assert self._matcher is not None
        mask = np.zeros(self._num_words, dtype=np.int32)
        self._matcher.fill(mask)
        mask[-1] &= ~np.bitwise_or.reduce(_bits(self._beyond), initial=0)
        if self._num_tokens < self._min_tokens:
            longer = mask.copy()
            np.bitwise_and.at(longer, self._stops // WORD_BITS, ~_bits(self._stops))
            mask = longer if longer.any() else mask
        if not mask.any():
            raise GrammarError(f"the grammar allows no token after {self._num_tokens}")
        return mask


def _bits(token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Mask:
    return np.left_shift(np.uint32(1), (token_ids % WORD_BITS).astype(np.uint32)).view(np.int32)


def late_of(guides: Seq[Guide], *, alone: bool) -> list[bool]:
    """Wait a little for the masks of a computed step, and return which are still not there.

    Args:
        guides: those of the rows that sample.
        alone: whether no other rows wait for this.
    """
    pending = [guide._mask for guide in guides if not guide._mask.done()]  # noqa: SLF001 - one module
    if pending:
        wait(pending, _PATIENCE_ALONE_S if alone else _PATIENCE_S)
    found = [not guide.ready for guide in guides]
    for guide, is_late in zip(guides, found, strict=True):
        guide.missed = is_late
    return found


@dataclass(frozen=True, slots=True)
class Makers:
    """The threads that make masks, and the one that goes through output that came from elsewhere."""

    masks: Threads
    beginnings: Threads

    def close(self) -> None:
        """End them."""
        self.masks.close()
        self.beginnings.close()


class Grammars:
    """The grammars of one worker."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Begin without any; what compiles them is started when it is first needed.

        Raises:
            GrammarError: there is no library of grammars, or none for this vocabulary.
        """
        for library in ("llguidance", "xgrammar"):
            if importlib.util.find_spec(library) is None:
                raise GrammarError(f"{library} is not installed")
        self._vocab_size = vocabulary.size
        self._compiler = GrammarCompiler(Backends(vocabulary), CompilerChild(vocabulary))
        self._makers = Makers(Threads(_MASK_THREADS, "grammar-masks"), Threads(1, "grammar-beginnings"))

    def warm_up(self) -> None:
        """Start what compiles, so that no request waits for that."""
        self._compiler.warm_up()

    def guide(self, structured: StructuredOutput, output: Output) -> Guide:
        """Return the guide of a sequence; its grammar may have to be compiled first."""
        return Guide(self._compiler.get(structured), output, self._vocab_size, self._makers)

    def close(self) -> None:
        """End what is under way."""
        self._makers.close()
        self._compiler.close()
