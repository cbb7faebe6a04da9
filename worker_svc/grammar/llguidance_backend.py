"""JSON schemas, regular expressions and choices by llguidance.

It takes most of JSON Schema as it is meant, computes masks as they are needed, and bounds each of its steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from octavo.sampling import StructuredOutput

from worker_svc.grammar.backend import WORD_BITS, CompiledGrammar, GrammarError, Mask, Matcher, Vocabulary
from worker_svc.grammar.closing import closed

_ANY_OBJECT: Final = {"type": "object"}
_MAX_STATES: Final = 30_000
"""Of the automaton behind a grammar, at 1 to 2 kB each: it grows while outputs are made."""
_MEANINGS: Final = {
    "NoExtensionBias": "the grammar allows no token",
    "ParserTooComplex": "it is too complex: too much has to be tried for a token",
    "LexerTooComplex": "it is too complex: too much has to be tried for a token",
}
_MAX_SPACES: Final = 20
"""In a row, after which other tokens are taken where there are any: a model may run on in spaces for ever."""
_SPACES: Final = b" \t\r\n"
_JSON: Final = '{"grammars":[{"name":"json_schema"'
"""How the text of a grammar begins that came of a schema."""
_BYTES_PER_BYTE: Final = 160
"""What a grammar takes for each byte of its text, at most about."""


class LlguidanceBackend:
    """A `GrammarBackend` over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Read the vocabulary; raises GrammarError when it cannot be read."""
        import llguidance  # noqa: PLC0415 - optional
        import llguidance.numpy  # noqa: PLC0415

        if not vocabulary.stop_token_ids:
            raise GrammarError("the model has no token that ends a text")
        self._vocabulary = vocabulary
        self._library: Any = llguidance
        # Errors end up with clients: they are to be short.
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        try:
            self._tokens = llguidance.LLTokenizer(
                vocabulary.tokenizer_json,
                n_vocab=vocabulary.size,
                eos_token=list(vocabulary.stop_token_ids[:1]),
            )
        except (RuntimeError, ValueError) as error:
            raise GrammarError(f"llguidance cannot read the model's vocabulary: {error}") from None
        self._spaces = _Spaces(self._tokens, vocabulary.size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens over which it compiles."""
        return self._vocabulary

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Compile a constraint; raises GrammarError."""
        try:
            return self._compiled(self._text(structured))
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)) from None

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        """Return a compiled grammar for another process."""
        assert isinstance(compiled, LlGrammar)
        return compiled.text.encode()

    def deserialize(self, data: bytes) -> CompiledGrammar:
        """Return the grammar that another process has compiled, which it therefore can be here."""
        return self._compiled(data.decode())

    def _compiled(self, text: str) -> LlGrammar:
        beginning = self._library.LLMatcher(self._tokens, text, log_level=0, limits=self._limits)
        _check(beginning)
        spaces = self._spaces if text.startswith(_JSON) else None
        end_token_id = self._vocabulary.stop_token_ids[0]
        return LlGrammar(text, beginning, self._library.numpy, end_token_id, spaces)

    def _text(self, structured: StructuredOutput) -> str:
        """Return a constraint as llguidance takes it."""
        matcher = self._library.LLMatcher
        if structured.regex is not None:
            return str(matcher.grammar_from_regex(structured.regex))
        if structured.choice is not None:
            quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice)
            return str(matcher.grammar_from_lark(f"start: {quoted}"))
        strict = structured.strict or False
        options: dict[str, Any] = {"lenient": not strict, "coerce_one_of": not strict}
        if structured.compact:
            options |= {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        wanted = _ANY_OBJECT if structured.json_schema is None else json.loads(structured.json_schema)
        return str(matcher.grammar_from_json_schema(json.dumps(closed(wanted)), overrides=options))


class _Spaces:
    """The tokens that are nothing but space."""

    def __init__(self, tokens: Any, vocab_size: int) -> None:
        texts = ((token_id, tokens.decode_bytes([token_id])) for token_id in range(tokens.vocab_size))
        self.lengths = {token_id: len(text) for token_id, text in texts if text and not text.strip(_SPACES)}
        others = np.full(-(-vocab_size // WORD_BITS), -1, dtype=np.int32)
        ids = np.array(sorted(self.lengths), dtype=np.int64)
        bits = np.left_shift(np.uint32(1), (ids % WORD_BITS).astype(np.uint32)).view(np.int32)
        np.bitwise_and.at(others, ids // WORD_BITS, ~bits)
        self.others: Mask = others


@dataclass(frozen=True, slots=True)
class LlGrammar:
    """A `CompiledGrammar`."""

    text: str
    beginning: Any
    numpy: Any
    end_token_id: int
    spaces: _Spaces | None
    """Of JSON, whose spaces are bounded."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.text) * _BYTES_PER_BYTE

    def matcher(self, stop_token_ids: Iterable[int]) -> Matcher:
        """Return the beginning of an output."""
        return LlMatcher(self, np.array(sorted(stop_token_ids), dtype=np.int64))


class LlMatcher:
    """A `Matcher`."""

    def __init__(self, grammar: LlGrammar, stops: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._handle = grammar.beginning.deep_copy()
        self._fill = grammar.numpy.fill_next_token_bitmask
        self._end_token_id = grammar.end_token_id
        self._spaces = grammar.spaces
        self._num_spaces = 0
        self._words = stops // WORD_BITS
        self._bits = np.left_shift(np.uint32(1), (stops % WORD_BITS).astype(np.uint32)).view(np.int32)

    def accept(self, token_id: int) -> bool:
        """Go on by one token."""
        if self._spaces is not None:
            length = self._spaces.lengths.get(token_id, 0)
            self._num_spaces = self._num_spaces + length if length else 0
        return bool(self._handle.consume_token(token_id))

    def fill(self, mask: Mask) -> None:
        """Say which tokens are allowed now; raises GrammarError."""
        self._fill(self._handle, mask[np.newaxis])
        _check(self._handle)
        word, bit = divmod(self._end_token_id, WORD_BITS)
        may_end = bool(np.uint32(mask[word].view(np.uint32)) >> np.uint32(bit) & np.uint32(1))
        # What ends this sequence, and nothing else of it.
        np.bitwise_and.at(mask, self._words, ~self._bits)
        if may_end:
            np.bitwise_or.at(mask, self._words, self._bits)
        if self._spaces is not None and self._num_spaces >= _MAX_SPACES:
            others = mask & self._spaces.others
            if others.any():
                mask[:] = others


def _check(matcher: Any) -> None:
    """Raise GrammarError if something has gone wrong in it."""
    if matcher.is_error():
        said = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
        raise GrammarError(_MEANINGS.get(said, said))
