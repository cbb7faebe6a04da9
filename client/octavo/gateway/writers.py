"""Output of the SDK to JSON: whole answers, and the events of a stream.

An event for each token of each stream is most of what a gateway does, so what does not change in an
event is encoded once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Final

from octavo.gateway.errors import Failure
from octavo.gateway.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.gateway.schemas import CompletionRequest, GenerationRequest
from octavo.protocol.steps import TokenLogprobs
from octavo.types import Choice, Delta, GenerateResult, Progress, Usage

DONE: Final = b"data: [DONE]\n\n"
quote: Final[Callable[[str], str]] = encode_basestring
# Ends of lines to `str.splitlines` and its like that JSON leaves raw. An event is one line to everybody.
_LINE_ENDS: Final = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def to_json(value: object) -> bytes:
    """Return JSON, in which text stays readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + encoded_lines(to_json(value).decode()) + b"\n\n"


def encoded_lines(json_text: str) -> bytes:
    """Return JSON in UTF-8, escaping what some readers of streams split lines at."""
    if not json_text.isascii():
        for end, escaped in _LINE_ENDS.items():
            json_text = json_text.replace(end, escaped)
    return json_text.encode()


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer and all of its events begin with."""

    id: str
    created: int
    model: str


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the usage of all prompts of an answer together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "trimmed_tokens": sum(usage.trimmed_tokens for usage in usages),
        },
    }
    clamped = [usage.clamped_max_tokens for usage in usages if usage.clamped_max_tokens is not None]
    if clamped:
        found["completion_tokens_details"] = {"clamped_max_tokens": min(clamped)}
    return found


class WholeWriter(ABC):
    """Writes the whole answer to one request."""

    @abstractmethod
    def whole(self, results: Sequence[GenerateResult]) -> bytes:
        """Return the answer that the outcomes of all prompts make."""

    def refusal(self, failure: Failure) -> bytes:
        """Return the answer of a request that failed."""
        return failure.encoded()

    def failed(self, failure: Failure) -> bytes:
        """Return the event that ends a stream which failed. Clients take it for an error."""
        return event(failure.body)


class Writer(WholeWriter):
    """Writes the answer to one request, whole or as events."""

    def scored(self, choices: range, entries: Sequence[TokenLogprobs]) -> None:
        """Take the log probabilities of the prompt that these choices have; before any output of them."""

    @abstractmethod
    def events(
        self, progress: Progress, first_choice: int, prompt_tokens: int, *, in_reasoning: bool = False
    ) -> bytes:
        """Return the events for what came of the prompt whose choices begin at `first_choice`.

        `in_reasoning`: the output goes on with thoughts that the prompt begins.
        """

    @abstractmethod
    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events that end a stream."""


class ChoicesWriter(Writer):
    """Writes choices, as OpenAI's older endpoints have them.

    `choice` counts through all prompts: choice j of prompt i is number i * n + j.
    """

    object_whole: str
    object_event: str

    def __init__(self, request: GenerationRequest, head: Head, num_choices: int) -> None:
        self._head = head
        self._with_ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._stop_token_ids = frozenset(request.stop_token_ids or ())
        options = request.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._num_tokens = [0] * num_choices
        self._wants_scores = request.prompt_logprobs is not None
        self._scores: dict[int, list[dict[str, Any] | None]] = {}
        """Log probabilities of the prompt of each choice, where they are a member of their own."""
        self._in_reasoning = False
        self._begin = (
            f'data: {{"id":{quote(head.id)},"object":"{self.object_event}","created":{head.created},'
            f'"model":{quote(head.model)},"choices":[{{"index":'
        )

    def scored(self, choices: range, entries: Sequence[TokenLogprobs]) -> None:
        """Take the log probabilities of the prompt that these choices have; before any output of them."""
        if entries and self._wants_scores:
            found = prompt_logprobs(entries, as_ids=self._as_ids)
            self._scores.update(dict.fromkeys(choices, found))

    # Events --------------------------------------------------------------------------------------

    def events(
        self, progress: Progress, first_choice: int, prompt_tokens: int, *, in_reasoning: bool = False
    ) -> bytes:
        """Return the events for what came of the prompt whose choices begin at `first_choice`."""
        self._in_reasoning = in_reasoning
        ended = {choice.index: choice for choice in progress.ended}
        parts: list[str] = []
        for delta in progress.deltas:
            parts += self._event(delta, first_choice, ended.pop(delta.choice, None), prompt_tokens)
        for choice in ended.values():
            parts += self._event(Delta(choice.index, "", ()), first_choice, choice, prompt_tokens)
        return encoded_lines("".join(parts))

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events that end a stream."""
        if not self._usage_at_end:
            return DONE
        head = self._head
        return (
            event(
                {
                    "id": head.id,
                    "object": self.object_event,
                    "created": head.created,
                    "model": head.model,
                    "choices": [],
                    "usage": usage_object(usages),
                }
            )
            + DONE
        )

    def _event(self, delta: Delta, first_choice: int, ended: Choice | None, prompt_tokens: int) -> list[str]:
        index = first_choice + delta.choice
        output = self._delta(index, delta, ended)
        if not output:
            return []
        parts = [self._begin, str(index), ",", output]
        if ended is not None:
            for name, value in self._finish(index, ended).items():
                parts.append(f',"{name}":{json.dumps(value, ensure_ascii=False)}')
        else:
            parts.append(',"finish_reason":null')
        if self._with_ids:
            parts.append(f',"token_ids":{list(delta.token_ids)}')
        parts.append("}]")
        if self._usage_always:
            tokens = self._num_tokens[index] = self._num_tokens[index] + len(delta.token_ids)
            parts.append(
                f',"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":{tokens},'
                f'"total_tokens":{prompt_tokens + tokens}}}'
            )
        parts.append("}\n\n")
        return parts

    def _finish(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return why a choice ended. As with `vllm serve`, an end-of-sequence token is no `stop_reason`."""
        told = isinstance(choice.stop, str) or choice.stop in self._stop_token_ids
        return {"finish_reason": self._reason(index, choice), "stop_reason": choice.stop if told else None}

    def _reason(self, index: int, choice: Choice) -> str | None:
        del index
        return choice.finish_reason.name.lower() if choice.finish_reason is not None else None

    @abstractmethod
    def _delta(self, index: int, delta: Delta, ended: Choice | None) -> str:
        """Return the members of a choice in an event that hold its output; "" when there is no event yet."""

    # Whole answers -------------------------------------------------------------------------------

    def whole(self, results: Sequence[GenerateResult]) -> bytes:
        """Return the answer that the outcomes of all prompts make."""
        self._in_reasoning = results[0].in_reasoning
        choices: list[Choice] = []
        for result in results:
            first = len(choices)
            choices += result.choices
            self.scored(range(first, len(choices)), result.prompt_logprobs)
        head = self._head
        return to_json(
            {
                "id": head.id,
                "object": self.object_whole,
                "created": head.created,
                "model": head.model,
                "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
                "usage": usage_object([result.usage for result in results]),
                **self._more(),
            }
        )

    def _more(self) -> dict[str, Any]:
        """Return further members of a whole answer."""
        return {}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = {"index": index, **self._output(index, choice), **self._finish(index, choice)}
        if self._with_ids:
            found["token_ids"] = list(choice.token_ids)
        return found

    @abstractmethod
    def _output(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the members of a whole choice that hold its output."""


class CompletionWriter(ChoicesWriter):
    """Answers of /v1/completions."""

    object_whole = object_event = "text_completion"

    def __init__(self, request: CompletionRequest, head: Head, echoes: Sequence[str]) -> None:
        """`echoes`: what the text of each choice begins with."""
        super().__init__(request, head, len(echoes))
        self._echoes = list(echoes)
        self._scored: dict[int, tuple[TokenLogprobs, ...]] = {}
        """Log probabilities of the echo of each choice that has not begun."""
        self._logprobs = (
            [CompletionLogprobs(as_ids=self._as_ids) for _ in echoes]
            if request.logprobs is not None
            else None
        )

    def scored(self, choices: range, entries: Sequence[TokenLogprobs]) -> None:
        """Take the log probabilities of a prompt: those of its echo, too."""
        super().scored(choices, entries)
        if self._logprobs is not None and any(self._echoes[index] for index in choices):
            self._scored.update(dict.fromkeys(choices, tuple(entries)))

    def _delta(self, index: int, delta: Delta, ended: Choice | None) -> str:
        text = delta.text
        if self._echoes[index]:
            text, self._echoes[index] = self._echoes[index] + text, ""
        if self._logprobs is None:
            return f'"text":{quote(text)},"logprobs":null'
        entries = (*self._scored.pop(index, ()), *delta.logprobs)
        logprobs = json.dumps(self._logprobs[index].take(entries), ensure_ascii=False)
        return f'"text":{quote(text)},"logprobs":{logprobs}'

    def _output(self, index: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"text": self._echoes[index] + choice.text, "logprobs": None}
        if self._logprobs is not None:
            entries = (*self._scored.pop(index, ()), *choice.logprobs)
            found["logprobs"] = self._logprobs[index].take(entries)
        if index in self._scores:
            found["prompt_logprobs"] = self._scores[index]
        return found
