"""Builds a tokenizer.json out of the tokenizer that a GGUF file describes in its metadata.

The file states the vocabulary, the merges and the name of a pre-tokenizer; how that one splits text
is llama.cpp's knowledge and is spelled out here for the byte-level BPE families we serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker_svc.errors import ModelLoadError
from worker_svc.models.generation import gguf_defaults
from worker_svc.models.text import ModelText

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPECIAL_IDS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_TURN: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"}
)
"""Control tokens that end an answer under any chat template that uses them."""

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(use_regex=False)]
    )


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "default": lambda: _byte_level(use_regex=True),
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _digits_apart,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "dbrx": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}
_COMPOSED: Final = frozenset({"qwen2"})
"""Pre-tokenizers whose vocabulary was learned on NFC text."""
_WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe", "llama3"})
"""A piece that is in the vocabulary is taken whole, whatever the merges say; a text begins with the
BOS token unless the file says otherwise."""


def gguf_text(metadata: Mapping[str, Any], path: Path) -> ModelText:
    """Return tokenizer, end tokens, chat template and sampling defaults of the GGUF file at `path`.

    Raises:
        ModelLoadError: the file describes a tokenizer that is not supported, or contradicts itself.
    """
    source = str(path)
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges: list[str] = metadata.get("tokenizer.ggml.merges", [])
        kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
        special = {
            role: int(metadata[key]) for role, key in _SPECIAL_IDS.items() if metadata.get(key) is not None
        }
        named_ends = [metadata.get(f"tokenizer.ggml.{name}") for name in _END_IDS]
        special_tokens = {role: tokens[token_id] for role, token_id in special.items()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{source}: its tokenizer's metadata is incomplete: {error}") from error
    bos = special.get("bos_token")
    begins = metadata.get("tokenizer.ggml.add_bos_token", _pre_tokenizer_of(metadata) in _WHOLE_WORDS_FIRST)
    add_bos = bool(begins) and bos is not None
    controls = [index for index, kind in enumerate(kinds) if kind == _CONTROL]
    end_of_turn = [index for index in controls if tokens[index] in _END_OF_TURN]
    ends = dict.fromkeys(int(token_id) for token_id in (*named_ends, *end_of_turn) if token_id is not None)
    tokenizer = _build(metadata, tokens, merges, source)
    tokenizer.add_special_tokens([_whole(tokens[index], special=True) for index in controls])
    tokenizer.add_tokens(
        [_whole(tokens[index], special=False) for index, kind in enumerate(kinds) if kind == _USER_DEFINED]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ModelLoadError(f"{source}: its vocabulary names a token twice")
    if add_bos and bos is not None:
        text = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, bos)]
        )
    return ModelText(
        tokenizer_files={"tokenizer.json": tokenizer.to_str().encode()},
        eos_token_ids=tuple(ends),
        bos_token_id=bos,
        add_bos_token=add_bos,
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens,
        generation_defaults=gguf_defaults(metadata, path),
    )


def _pre_tokenizer_of(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _whole(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=special)


def _build(metadata: Mapping[str, Any], tokens: list[str], merges: list[str], source: str) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelLoadError(
            f"{source}: tokenizer model {model} is not supported (supported: gpt2, i.e. byte-level BPE)"
        )
    name = _pre_tokenizer_of(metadata)
    make_pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if make_pre_tokenizer is None:
        raise ModelLoadError(
            f"{source}: pre-tokenizer {name} is not supported (supported: {', '.join(_PRE_TOKENIZERS)})"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{source}: its merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
