"""Log probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Final

from octavo.protocol.steps import TokenLogprobs

# JSON has no infinity; OpenAI's and vLLM's stand-in for it.
_LEAST: Final = -9999.0
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Names the tokens of one choice, one position after the other.

    A token that leaves a character unfinished is called by what it completes, perhaps nothing; the one
    that finishes the character is called by all of it. So the names make up the text.
    """

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._decoder = _utf8_decoder("replace")

    def at(self, entry: TokenLogprobs) -> tuple[str, list[str]]:
        """Return the names of the sampled token and of the best ones, and go on to the next position."""
        if self._as_ids:
            return f"token_id:{entry.token_id}", [f"token_id:{token_id}" for token_id in entry.top_token_ids]
        before = self._decoder.getstate()
        best = []
        for data in entry.top_token_bytes:
            self._decoder.setstate(before)
            best.append(self._decoder.decode(data))
        self._decoder.setstate(before)
        return self._decoder.decode(entry.token_bytes), best


def prompt_logprobs(entries: Sequence[TokenLogprobs], *, as_ids: bool) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` of `vllm serve`: for each token of a prompt, itself and the best ones."""
    texts, found = TokenTexts(as_ids=as_ids), list[dict[str, Any] | None]()
    for entry in entries:
        name, best = texts.at(entry)
        if not entry.rank:
            found.append(None)
            continue
        alternatives = zip(entry.top_token_ids, entry.top_logprobs, best, strict=True)
        ranked = [
            (token_id, logprob, rank, text)
            for rank, (token_id, logprob, text) in enumerate(alternatives, start=1)
            if token_id != entry.token_id
        ]
        found.append(
            {
                str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
                for token_id, logprob, rank, text in [
                    (entry.token_id, entry.logprob, entry.rank, name),
                    *ranked,
                ]
            }
        )
    return found


class CompletionLogprobs:
    """The `logprobs` object of a choice of /v1/completions."""

    def __init__(self, *, as_ids: bool) -> None:
        self._texts = TokenTexts(as_ids=as_ids)
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for the positions that have come."""
        tokens, offsets = list[str](), list[int]()
        values, tops = list[float | None](), list[dict[str, float] | None]()
        for entry in entries:
            name, best = self._texts.at(entry)
            # The token itself is always there, the best ones beside it.
            top = {name: _finite(entry.logprob)}
            top.update(zip(best, map(_finite, entry.top_logprobs), strict=True))
            tokens.append(name)
            # The first token of a prompt follows nothing.
            values.append(_finite(entry.logprob) if entry.rank else None)
            tops.append(top if entry.rank else None)
            offsets.append(self._offset)
            self._offset += len(name)
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


class ChatLogprobs:
    """The `logprobs` object of a choice of /v1/chat/completions."""

    def __init__(self, *, as_ids: bool) -> None:
        self._texts = TokenTexts(as_ids=as_ids)

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for the positions that have come."""
        content = []
        for entry in entries:
            name, best = self._texts.at(entry)
            alternatives = zip(best, entry.top_logprobs, entry.top_token_bytes, strict=True)
            content.append(
                {
                    **_token(name, entry.logprob, entry.token_bytes),
                    "top_logprobs": [_token(*alternative) for alternative in alternatives],
                }
            )
        return {"content": content, "refusal": None}


def _token(name: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
