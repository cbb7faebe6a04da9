"""How to pick the next token and when to stop: one record for client, scheduler and worker.

A parameter that is one number or one flag is described here once, with its range and its neutral value.
Conversion, defaults, checks and flags of the command line follow from that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Final, TypedDict

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_BAD_SEQUENCES = 256
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SEED = 2**64 - 1
_MAX_INT = 2**31 - 1
_BIAS_BYTES = 11
_TOKEN_BYTES = 4
_EMPTY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scalar:
    """What is to be known of a parameter that is one number or one flag."""

    kind: type[float | int | bool]
    low: float = 0
    high: float = math.inf
    above_low: bool = False
    """`low` itself is out of range."""
    neutral: float | None = None
    """In force when neither the request nor the model says a value; None where it stays open."""
    of_model: bool = False
    """A model may come with a default for it, as in a Hugging Face generation_config.json."""
    flag_help: str = ""
    """What its flag of the command line does; it has none when this is empty."""

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest value, which are within the range."""
        least = math.nextafter(self.low, math.inf) if self.above_low else self.low
        return least, min(self.high, sys.float_info.max)

    def problem_of(self, value: float) -> str:
        """Return what is wrong with a value out of range."""
        if self.kind is int:
            return f"must be in [{self.low}, {self.high}], got {value}"
        bounds = f"{'(' if self.above_low else '['}{self.low:g}, {self.high:g}"
        return f"must be a finite number in {bounds}{']' if self.high < math.inf else ')'}, got {value}"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint on the output text: exactly one field but `strict` and `compact` is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    strict: bool | None = None
    compact: bool | None = None

    @property
    def size_bytes(self) -> int:
        """About what its texts take in a message."""
        texts = (self.json_schema, self.regex, self.grammar, self.structural_tag, *(self.choice or ()))
        return sum(len(text) for text in texts if text is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. None means: the default that comes with the model.

    Meanings and ranges are those of `SamplingParams` in common.proto. Construction does not
    validate; `violations()` lists what is wrong, so that every fault is named at once.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _EMPTY)
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int | None = None
    logprobs: int | None = None
    structured: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def violations(self) -> list[tuple[str, str]]:
        """Return (field, what is wrong) for each field out of range."""
        found: list[tuple[str, str]] = []
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                found.append((name, SCALARS[name].problem_of(value)))
        if (
            self.min_tokens is not None
            and self.max_tokens is not None
            and self.min_tokens > self.max_tokens >= 1
        ):
            found.append(
                ("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            found.append(("max_tokens", "must be at least 1, unless prompt_logprobs is set, got 0"))
        for token_id, bias in islice(self.logit_bias.items(), MAX_LOGIT_BIASES):
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                found.append(("logit_bias", f"must be in [-100, 100], got {bias} for token {token_id}"))
        return found + self._list_violations()

    def _list_violations(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name, most in _MOST_ENTRIES.items():
            if (count := len(getattr(self, name))) > most:
                found.append((name, f"at most {most} entries, got {count}"))
        for name, most in (("stop", MAX_STOP_BYTES), ("bad_words", MAX_BAD_WORD_BYTES)):
            for text in getattr(self, name)[: _MOST_ENTRIES[name]]:
                if not text.strip() if name == "bad_words" else not text:
                    found.append((name, "an entry must not be empty"))
                elif len(text.encode("utf-8", "surrogatepass")) > most:
                    found.append((name, f"an entry is at most {most} bytes long"))
        for sequence in self.bad_words_token_ids[:MAX_BAD_SEQUENCES]:
            if not 1 <= len(sequence) <= MAX_BAD_SEQUENCE_TOKENS:
                problem = f"an entry has 1 to {MAX_BAD_SEQUENCE_TOKENS} tokens, got {len(sequence)}"
                found.append(("bad_words_token_ids", problem))
        return found

    @property
    def size_bytes(self) -> int:
        """About what lists, maps and texts of it take in a message."""
        texts = sum(map(len, self.stop)) + (self.structured.size_bytes if self.structured is not None else 0)
        lists = (
            self.stop_token_ids,
            self.allowed_token_ids,
            self.logprob_token_ids,
            *self.bad_words_token_ids,
        )
        return _BIAS_BYTES * len(self.logit_bias) + _TOKEN_BYTES * sum(map(len, lists)) + texts

    def completed_by(self, defaults: SamplingParams) -> SamplingParams:
        """Return these parameters with the defaults for those numbers and flags that are None."""
        missing = {name: getattr(defaults, name) for name in SCALARS if getattr(self, name) is None}
        return replace(self, **missing)


SCALARS: Final[Mapping[str, Scalar]] = {
    "temperature": Scalar(
        float, neutral=1.0, of_model=True, flag_help="0 is greedy; absent takes the model's own"
    ),
    "top_p": Scalar(
        float,
        high=1,
        above_low=True,
        neutral=1.0,
        of_model=True,
        flag_help="keep the smallest set of tokens with this probability",
    ),
    "top_k": Scalar(
        int, high=_MAX_INT, neutral=0, of_model=True, flag_help="keep this many most likely tokens"
    ),
    "min_p": Scalar(
        float,
        high=1,
        neutral=0.0,
        of_model=True,
        flag_help="keep tokens with this share of the best one's probability",
    ),
    "repetition_penalty": Scalar(
        float, above_low=True, neutral=1.0, of_model=True, flag_help="divide the logits of tokens seen before"
    ),
    "presence_penalty": Scalar(
        float, -2, 2, neutral=0.0, flag_help="subtract from the logits of tokens in the output, once"
    ),
    "frequency_penalty": Scalar(float, -2, 2, neutral=0.0, flag_help="subtract from them for each time"),
    "seed": Scalar(int, high=MAX_SEED, flag_help="random stream; the same seed gives the same output"),
    "min_tokens": Scalar(int, high=_MAX_INT, neutral=0, flag_help="no stop before this many output tokens"),
    "max_tokens": Scalar(int, 0, _MAX_INT, flag_help="output tokens at most"),
    "ignore_eos": Scalar(bool, neutral=False),
    "n": Scalar(int, 1, MAX_N, neutral=1),
    "logprobs": Scalar(int, high=MAX_LOGPROBS),
    "include_stop_str_in_output": Scalar(bool, neutral=False),
    "prompt_logprobs": Scalar(int, high=MAX_LOGPROBS),
}
"""The parameters that are one number or one flag."""
OF_MODEL: Final = tuple(name for name, scalar in SCALARS.items() if scalar.of_model)
"""Those for which a model may come with a default."""
_MOST_ENTRIES: Final = {
    "stop": MAX_STOP_STRINGS,
    "logit_bias": MAX_LOGIT_BIASES,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "bad_words_token_ids": MAX_BAD_SEQUENCES,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
_RANGES: Final = {name: scalar.range for name, scalar in SCALARS.items()}
NEUTRAL: Final = SamplingParams(**{name: scalar.neutral for name, scalar in SCALARS.items()})  # type: ignore[arg-type]  # by the table
"""What a request gets that neither says nor finds among the model's defaults."""


class SamplingOptions(TypedDict, total=False):
    """The parameters as keywords of the SDK."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    min_tokens: int
    max_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    n: int
    logprobs: int
    structured: StructuredOutput
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_words_token_ids: Sequence[Sequence[int]]
    include_stop_str_in_output: bool
    logprob_token_ids: Sequence[int]
    prompt_logprobs: int
