"""How to pick the next token and when to stop: one record for client, scheduler and worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
_EMPTY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint on the output text; exactly one field is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. None means: as the model's generation_config says.

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

    def violations(self) -> list[tuple[str, str]]:
        """Return (field, what is wrong) for each field out of range."""
        found: list[tuple[str, str]] = []
        for name, low, high, open_low in (
            ("temperature", 0.0, math.inf, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.0, math.inf, True),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            too_low = value <= low if open_low else value < low
            if not math.isfinite(value) or too_low or value > high:
                bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if high < math.inf else ')'}"
                found.append((name, f"must be a finite number in {bounds}, got {value}"))
        for name, least, most in (
            ("top_k", 0, 2**31 - 1),
            ("seed", 0, MAX_SEED),
            ("min_tokens", 0, 2**31 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("n", 1, MAX_N),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            count = getattr(self, name)
            if count is not None and not least <= count <= most:
                found.append((name, f"must be in [{least}, {most}], got {count}"))
        if (
            self.min_tokens is not None
            and self.max_tokens is not None
            and self.min_tokens > self.max_tokens >= 1
        ):
            found.append(
                ("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            found.append(("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}"))
        for text in self.stop:
            if not text:
                found.append(("stop", "a stop string must not be empty"))
            elif len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                found.append(("stop", f"a stop string is at most {MAX_STOP_BYTES} bytes long"))
        for token_id, bias in self.logit_bias.items():
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                found.append(("logit_bias", f"must be in [-100, 100], got {bias} for token {token_id}"))
        return found
