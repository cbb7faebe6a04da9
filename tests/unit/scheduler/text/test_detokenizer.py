"""Incremental detokenization says, in pieces, what the tokenizer says of the whole."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scheduler_svc.text.detokenizer import Detokenizer, TableKind, TokenTable, WindowDetokenizer, WindowStream
from scheduler_svc.text.tokenization import make_table, special_tokens

TRAINING = [
    "The quick brown fox jumps over the lazy dog. Grüße aus Köln! 你好、世界。 こんにちは 🎉🎊 naïve café",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\tprint('héllo wörld') # 中文注释 🤖",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>"]
EDGE = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e01\u0e33 e\u0301 \x00\x7f"


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen, SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool) -> Tokenizer:
    """As Llama 2 and Mistral (with `strip`), or Gemma."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", "\u2581the", "\u2581fox", "e", "é", "你", "好", "\u2581\u2581", "ing", ".", "\n"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIAL, "<unk>"]])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder for which a token's text depends on its place: no table."""
    words = [*SPECIAL, "<unk>", "\u2581the", "\u2581fox", "\u2581", "é", "x", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback_strip": byte_fallback(strip=True),
    "byte_fallback": byte_fallback(strip=False),
    "metaspace": metaspace(),
}
DETOKENIZERS: dict[str, Detokenizer] = {
    name: make_table(one) or WindowDetokenizer(one, special_tokens(one)) for name, one in TOKENIZERS.items()
}


def token(name: str, text: str) -> int:
    token_id = TOKENIZERS[name].token_to_id(text)
    assert token_id is not None
    return token_id


def in_pieces(detokenizer: Detokenizer, ids: list[int], cuts: set[int], *, keep_special: bool = False) -> str:
    """The text of tokens that come in pieces."""
    stream = detokenizer.stream((), keep_special=keep_special)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    parts = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    return "".join(parts) + stream.flush()


def test_tables_are_made_for_the_usual_tokenizers() -> None:
    kinds = {name: table.kind for name, one in TOKENIZERS.items() if (table := make_table(one)) is not None}
    assert kinds == {
        "byte_level": TableKind.BYTE_LEVEL,
        "byte_fallback_strip": TableKind.BYTE_FALLBACK,
        "byte_fallback": TableKind.BYTE_FALLBACK,
    }


@given(text=st.text(max_size=60) | st.just(EDGE), cuts=st.sets(st.integers(0, 200), max_size=20))
def test_byte_level_text_comes_back_whole(text: str, cuts: set[int]) -> None:
    ids = TOKENIZERS["byte_level"].encode(text).ids
    expected = TOKENIZERS["byte_level"].decode(ids)
    assert in_pieces(DETOKENIZERS["byte_level"], ids, cuts) == expected


@given(data=st.data(), keep_special=st.booleans())
@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_any_tokens_one_by_one_equal_the_whole(name: str, data: st.DataObject, keep_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Beyond the vocabulary, too: models have more logits than their tokenizers have tokens.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=not keep_special)
    cuts = set(range(len(ids)))
    assert in_pieces(DETOKENIZERS[name], ids, cuts, keep_special=keep_special) == expected


@given(
    text=st.text("thefoxé你好 .\n🎉ab", max_size=40),
    tail=st.sampled_from([[], [4 + 0xF0], [4 + 0xE4, 4 + 0xBD]]),
    cuts=st.sets(st.integers(0, 200), max_size=20),
)
@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback_strip"])
def test_byte_fallback_equals_the_whole(name: str, text: str, tail: list[int], cuts: set[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids: list[int] = []
    for character in text:
        known = tokenizer.token_to_id(character.replace(" ", "\u2581"))
        ids += [known] if known is not None else [4 + byte for byte in character.encode()]
    # An unfinished character at the end; after a byte token it would spoil the run before it.
    if ids and ids[-1] >= 260:
        ids += tail
    assert in_pieces(DETOKENIZERS[name], ids, cuts) == tokenizer.decode(ids)


def test_byte_fallback_unfinished_bytes_are_replaced_one_by_one() -> None:
    stream = DETOKENIZERS["byte_fallback"].stream((), keep_special=False)
    euro = [4 + byte for byte in "€".encode()]
    assert stream.feed(euro[:2]) == ""
    assert stream.feed([token("byte_fallback", "ing")]) == "\ufffd\ufffding"
    assert stream.feed(euro) == "€"


def test_text_after_a_prompt_keeps_its_leading_space() -> None:
    name = "byte_fallback_strip"
    bos, the, fox = token(name, "<s>"), token(name, "\u2581the"), token(name, "\u2581fox")
    detokenizer = DETOKENIZERS[name]
    assert detokenizer.stream((bos, the), keep_special=False).feed([fox]) == " fox"
    assert detokenizer.stream((bos,), keep_special=False).feed([fox]) == "fox"


def test_prompt_that_ends_inside_a_character_is_completed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [token("byte_level", piece) for piece in ("ð", "Ł", "Ĵ", "ī")]
    assert tokenizer.decode(ids) == "💉"
    stream = DETOKENIZERS["byte_level"].stream(ids[:2], keep_special=False)
    assert [stream.feed([token_id]) for token_id in ids[2:]] == ["", "💉"]


@settings(max_examples=20)
@given(bad=st.binary(min_size=100, max_size=300))
def test_window_is_bounded_however_bad_the_text(bad: bytes) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    stream = WindowStream(tokenizer, (), frozenset())
    shown = 0
    for byte in bad:
        shown += len(stream.feed([4 + (byte | 0x80)]))
        assert len(stream._window) <= 64
    assert shown > 0


def test_table_survives_a_process_boundary_and_skips_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    table = make_table(tokenizer)
    assert isinstance(table, TokenTable)
    assert table.special == {token("byte_level", text) for text in SPECIAL}
    assert table.token_bytes(token("byte_level", "<think>")) == b"<think>"
    assert table.token_bytes(10**6) == b""
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "ByteLevel"
