"""Grammars and structural tags by xgrammar."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
from octavo.sampling import StructuredOutput
from tokenizers import Tokenizer

from worker_svc.grammar.backend import CompiledGrammar, GrammarError, Mask, Matcher, Vocabulary

_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


def _import_xgrammar() -> Any:
    """Import xgrammar without transformers, which takes seconds and of which it needs names only here."""
    if "transformers" in sys.modules or "xgrammar" in sys.modules:
        return importlib.import_module("xgrammar")
    stand_in = ModuleType("transformers")
    for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor"):
        setattr(stand_in, name, object)
    sys.modules["transformers"] = stand_in
    try:
        return importlib.import_module("xgrammar")
    finally:
        del sys.modules["transformers"]


class XGrammarBackend:
    """A `GrammarBackend` over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Read the vocabulary; raises GrammarError when it cannot be read."""
        self._vocabulary = vocabulary
        self._xgrammar = xgrammar = _import_xgrammar()
        try:
            # Its registers are those of a Hugging Face tokenizer, which is not needed for the rest.
            found = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)  # noqa: SLF001
            self._tokens = xgrammar.TokenizerInfo(
                _tokens_of(vocabulary),
                found["vocab_type"],
                vocab_size=vocabulary.size,
                stop_token_ids=list(vocabulary.stop_token_ids),
                add_prefix_space=found["add_prefix_space"],
            )
        except (RuntimeError, ValueError) as error:
            raise GrammarError(f"xgrammar cannot read the model's vocabulary: {_words(error)}") from None
        self._compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens over which it compiles."""
        return self._vocabulary

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Compile a constraint; raises GrammarError."""
        try:
            return XGrammar(self._xgrammar, self._compile(structured))
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise GrammarError(_words(error)) from None

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        """Return a compiled grammar for another process."""
        assert isinstance(compiled, XGrammar)
        return str(compiled.handle.serialize_json()).encode()

    def deserialize(self, data: bytes) -> CompiledGrammar:
        """Return the grammar that another process has compiled."""
        handle = self._xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._tokens)
        return XGrammar(self._xgrammar, handle)

    def _compile(self, structured: StructuredOutput) -> Any:
        if structured.structural_tag is not None:
            return self._compile_tag(structured.structural_tag)
        return self._compiler.compile_grammar(structured.grammar)

    def _compile_tag(self, text: str) -> Any:
        tag = json.loads(text)
        if "structures" not in tag:
            return self._compiler.compile_structural_tag(text)
        # The older form, which vLLM takes, too.
        items = [
            self._xgrammar.StructuralTagItem(
                begin=one.get("begin"), schema=one.get("schema"), end=one.get("end")
            )
            for one in tag["structures"]
        ]
        return self._compiler.compile_structural_tag(items, tag.get("triggers"))


@dataclass(frozen=True, slots=True)
class XGrammar:
    """A `CompiledGrammar`."""

    xgrammar: Any
    handle: Any

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return int(self.handle.memory_size_bytes)

    def matcher(self, stop_token_ids: Iterable[int]) -> Matcher:
        """Return the beginning of an output."""
        stops = sorted(stop_token_ids)
        return XMatcher(self.xgrammar.GrammarMatcher(self.handle, override_stop_tokens=stops or None))


class XMatcher:
    """A `Matcher`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def accept(self, token_id: int) -> bool:
        """Go on by one token."""
        return bool(self._handle.accept_token(token_id))

    def fill(self, mask: Mask) -> None:
        """Say which tokens are allowed now."""
        self._handle.fill_next_token_bitmask(mask[np.newaxis])


def _tokens_of(vocabulary: Vocabulary) -> list[str]:
    tokens = [""] * vocabulary.size
    for token, token_id in Tokenizer.from_str(vocabulary.tokenizer_json).get_vocab().items():
        if token_id < vocabulary.size:
            tokens[token_id] = token
    return tokens


def _words(error: Exception) -> str:
    """Return what xgrammar says, without where in its sources it says it."""
    return _PLACE.sub("", str(error).strip()) or type(error).__name__
