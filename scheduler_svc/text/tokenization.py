"""From what a client sent to token ids and block keys.

Everything here may take long for a long prompt, so it runs in a child process: see
`tokenizer_pool.py` for the parent's side and `tokenizer_child.py` for the child's loop. Token ids and
keys cross as packed bytes, since making a Python integer per token is what takes the time.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from octavo.parsing.formats import THOUGHTS_BEGIN, THOUGHTS_END
from octavo.protocol import keys
from octavo.v1 import generation_pb2 as pb
from tokenizers import Tokenizer

from scheduler_svc.text.chat import ChatTemplate, InputError
from scheduler_svc.text.detokenizer import TableKind, TokenTable, join_table
from scheduler_svc.text.trimming import TrimSpec, cut, trim_chat

_SAMPLES: Final = 200
# Normalizers may shorten a text, so a text is too long for certain only well beyond the bound.
_SLACK: Final = 4
_LONGEST_END: Final = 64
"""Of a prompt, in characters: where thoughts begin or end, and the space behind that."""


@dataclass(frozen=True, slots=True)
class TextSpec:
    """What text handling has to know of a model."""

    model: str
    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_token_id: int | None
    """Put before plain text when the tokenizer does not do so itself."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class KeySpec:
    """How to make the content keys of a prompt's blocks."""

    root: bytes
    block_size: int


@dataclass(frozen=True, slots=True)
class PromptExtra:
    """What few requests want done with a prompt."""

    keep_last: int | None = None
    """Tokens at its end to keep at most; what is before them is cut away."""
    bad_words: tuple[str, ...] = ()
    """Texts to tokenize as well."""


NO_EXTRA: Final = PromptExtra()


@dataclass(frozen=True, slots=True)
class EncodeText:
    """Tokenize plain text."""

    model: str
    max_model_len: int
    """Tokens of the context at the moment: workers come and go."""
    text: str
    add_special_tokens: bool = True
    keys: KeySpec | None = None
    trim: TrimSpec | None = None
    extra: PromptExtra = NO_EXTRA


@dataclass(frozen=True, slots=True)
class EncodeChat:
    """Render a conversation (a serialized octavo.v1.Chat) and tokenize it."""

    model: str
    max_model_len: int
    chat: bytes
    keys: KeySpec | None = None
    trim: TrimSpec | None = None
    extra: PromptExtra = NO_EXTRA


@dataclass(frozen=True, slots=True)
class TakeTokens:
    """Check token ids (a serialized octavo.v1.TokenIds)."""

    model: str
    max_model_len: int
    tokens: bytes
    keys: KeySpec | None = None
    trim: TrimSpec | None = None
    extra: PromptExtra = NO_EXTRA


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Answer who wants to see the tokens of an input."""

    model: str
    input: EncodeText | EncodeChat
    want_pieces: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Turn token ids (a serialized octavo.v1.TokenIds) into text."""

    model: str
    tokens: bytes
    keep_special: bool


@dataclass(frozen=True, slots=True)
class MakeTable:
    """Make the token table of a model; None when its tokenizer is of another kind."""

    model: str


EncodeJob = EncodeText | EncodeChat | TakeTokens
Job = EncodeJob | Tokenize | Decode | MakeTable


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt. `token_ids` are packed native uint32, `keys` are concatenated."""

    token_ids: bytes
    keys: bytes = b""
    trimmed_tokens: int = 0
    """Tokens of the prompt that were cut away."""
    in_reasoning: bool = False
    """It ends with the beginning of thoughts."""
    thoughts_over: bool = False
    """It ends with their end."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Their tokens."""


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A job that failed, and why. `field` is None when it may not be the input's fault."""

    problem: str
    field: str | None = None
    reason: str = "TOKENIZER_FAILED"


class TextModel:
    """A model's tokenizer and template, loaded.

    Every method raises `InputError` for what its caller can be told; `field` of it names the input.
    """

    def __init__(self, spec: TextSpec) -> None:
        self._spec = spec
        self._tokenizer = Tokenizer.from_buffer(spec.tokenizer_json)
        # Settings for training in the file would cut prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = make_table(self._tokenizer)
        self._longest_token_bytes = self._table.longest_token_bytes if self._table is not None else 256
        self._template = (
            ChatTemplate(spec.chat_template, spec.special_tokens) if spec.chat_template is not None else None
        )

    def run(self, job: Job) -> object:
        """Return the result of a job: Encoded, an answer, text or a table."""
        match job:
            case EncodeText():
                text = self._encode(job.text, "text", job, add_special_tokens=job.add_special_tokens)
                return self._finish(cut(_last(text, job.extra), job.trim), "text", job)
            case EncodeChat():
                return self._encode_chat(job)
            case TakeTokens():
                ids = self._unpack(job.tokens, "tokens.ids")
                return self._finish(cut(_last(ids, job.extra), job.trim), "tokens.ids", job)
            case Tokenize():
                return self._tokenize(job)
            case Decode():
                ids = self._unpack(job.tokens, "token_ids")
                return self._tokenizer.decode(ids.tolist(), skip_special_tokens=not job.keep_special)
            case MakeTable():
                return self._table

    def _tokenize(self, job: Tokenize) -> bytes:
        """Return a serialized octavo.v1.TokenizeResponse: an object per token is not for the event loop."""
        encoded, ids = self.run(job.input), array("I")
        assert isinstance(encoded, Encoded)
        ids.frombytes(encoded.token_ids)
        answer = pb.TokenizeResponse(token_ids=ids, max_model_len=job.input.max_model_len)
        if job.want_pieces:
            decode = self._tokenizer.decode
            answer.pieces.extend(decode([token_id], skip_special_tokens=False) for token_id in ids)
        return answer.SerializeToString()

    def _encode_chat(self, job: EncodeChat) -> Encoded:
        """Return a conversation's prompt."""
        if self._template is None:
            raise InputError("chat", f"model {self._spec.model} has no chat template", "CHAT_TEMPLATE")
        template, end = self._template, ""

        def encode(chat: pb.Chat) -> array[int]:
            nonlocal end
            text = template.render(chat, self._max_bytes(job))
            end = text[-_LONGEST_END:].rstrip()
            return _last(self._encode(text, "chat", job, add_special_tokens=False), job.extra)

        prompt = trim_chat(pb.Chat.FromString(job.chat), encode, job.trim)
        return replace(
            self._finish(prompt, "chat", job),
            in_reasoning=end.endswith(THOUGHTS_BEGIN),
            thoughts_over=end.endswith(THOUGHTS_END),
        )

    def _max_bytes(self, job: EncodeJob) -> int:
        """Return a size of text beyond which it cannot fit into the context."""
        return (job.max_model_len + 1) * self._longest_token_bytes * _SLACK

    def _encode(self, text: str, field: str, job: EncodeJob, *, add_special_tokens: bool) -> array[int]:
        if len(text) > self._max_bytes(job):
            raise InputError(
                field,
                f"{len(text)} characters do not fit into a context of {job.max_model_len} tokens",
                "PROMPT_TOO_LONG",
            )
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        bos = self._spec.bos_token_id
        if add_special_tokens and bos is not None and (not ids or ids[0] != bos):
            ids.insert(0, bos)
        return ids

    def _unpack(self, packed: bytes, field: str) -> array[int]:
        ids = array("I", pb.TokenIds.FromString(packed).ids)
        if ids and max(ids) >= self._spec.vocab_size:
            position = next(i for i, token_id in enumerate(ids) if token_id >= self._spec.vocab_size)
            raise InputError(
                f"{field}[{position}]", f"must be below {self._spec.vocab_size}, got {ids[position]}"
            )
        return ids

    def _finish(self, prompt: tuple[array[int], int], field: str, job: EncodeJob) -> Encoded:
        """Return a prompt with its keys; `prompt` is its tokens and how many were cut away."""
        ids, trimmed = prompt
        spec = job.keys
        if spec is None:
            return Encoded(ids.tobytes())
        if not ids:
            raise InputError(field, "the prompt is empty")
        if len(ids) >= job.max_model_len:
            raise InputError(
                field,
                f"the prompt has {len(ids)} tokens, the context holds {job.max_model_len} "
                "and must leave room for one more",
                "PROMPT_TOO_LONG",
            )
        block_keys = b"".join(keys.chain(spec.root, ids, spec.block_size))
        bad_words = tuple(chain.from_iterable(map(self._bad_word, job.extra.bad_words)))
        return Encoded(ids.tobytes(), block_keys, trimmed, bad_words=bad_words)

    def _bad_word(self, text: str) -> list[tuple[int, ...]]:
        """Return the tokens of a text at the start of a word and, where that is as long, after a space.

        As vLLM does it, so that the same words are kept out.
        """
        plain, spaced = (
            tuple(self._tokenizer.encode(prefix + text.lstrip(), add_special_tokens=False).ids)
            for prefix in ("", " ")
        )
        if not plain:
            raise InputError("sampling.bad_words", "an entry makes no token")
        differs = spaced and spaced[0] != plain[0] and len(spaced) == len(plain)
        return [plain, spaced] if differs else [plain]


def _last(ids: array[int], extra: PromptExtra) -> array[int]:
    return ids if extra.keep_last is None else ids[-extra.keep_last :]


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that are no text unless a client asks for them."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def make_table(tokenizer: Tokenizer) -> TokenTable | None:
    """Return the table of a tokenizer's tokens, or None when their text depends on their neighbours."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step["type"] for step in steps]
    special = special_tokens(tokenizer)
    table: TokenTable | None = None
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        table = join_table(
            TableKind.BYTE_LEVEL,
            _each_token(tokenizer, lambda token: _byte_level(token, alphabet)),
            special=special,
        )
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _REPLACE:
        rest = steps[3:]
        if rest in ([], [_STRIP]):
            table = join_table(
                TableKind.BYTE_FALLBACK,
                _each_token(tokenizer, _byte_fallback),
                special=special,
                byte_tokens=_byte_tokens(tokenizer),
                strips_first_space=bool(rest),
            )
    return table if table is not None and _agree(table, tokenizer) else None


_REPLACE: Final = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _each_token(tokenizer: Tokenizer, convert: Callable[[str], bytes]) -> list[bytes]:
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens = (tokenizer.id_to_token(token_id) for token_id in range(size))
    return [convert(token) if token is not None else b"" for token in tokens]


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable stand-ins to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes of a token; one with a character outside of the alphabet is plain text."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in found if token_id is not None)


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()


def _agree(table: TokenTable, tokenizer: Tokenizer) -> bool:
    """Return whether table and tokenizer decode a sample of random sequences alike."""
    # Sequences with an invalid run of byte tokens are left out: see `ByteFallbackStream`.
    plain = [token_id for token_id in range(len(table)) if token_id not in table.byte_tokens]
    generator = random.Random(0)  # noqa: S311 - a sample, not a secret
    for _ in range(_SAMPLES):
        ids = generator.choices(plain, k=generator.randint(1, 12))
        stream = table.stream((), keep_special=False)
        if stream.feed(ids) + stream.flush() != tokenizer.decode(ids):
            return False
    return True
