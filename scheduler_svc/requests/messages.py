"""The public API: a request as a validated record, and its conversion from and to protobuf.

`x_from_proto` checks what can be checked without the model and names every fault at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.protocol.bounds import MAX_CACHE_SALT, MAX_ORDER, MAX_REQUEST_ID
from octavo.protocol.convert import finish_reason_to_proto, logprobs_to_proto, pooling_from_proto
from octavo.protocol.convert_sampling import ProtocolError, sampling_from_proto
from octavo.protocol.steps import Pooling, Priority, TokenLogprobs
from octavo.sampling import SamplingParams
from octavo.structured import problem_of
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.core.effects import ChoiceTimings, FinishChoice, RequestAccepted
from scheduler_svc.errors import ServiceError

Violations = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: a serialized octavo.v1.Chat, parsed where it is rendered."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids: a serialized octavo.v1.TokenIds, parsed where it is checked."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What a client asks of the service. Durations in seconds; None takes the default."""

    priority: Priority = Priority.STANDARD
    queue_timeout_s: float | None = None
    ttft_deadline_s: float | None = None
    deadline_s: float | None = None
    cache_salt: str = ""
    may_trim: bool = False
    """The prompt may be shortened and max_tokens lowered under load."""
    keep_head_tokens: int = 0
    keep_tail_tokens: int = 0
    may_shed: bool = False
    """It may be refused before others under load."""
    order: int = 0
    """Within the class; lower goes first."""


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """What one choice that goes on had generated, and how much of its text was shown."""

    token_ids: tuple[int, ...]
    shown_bytes: int


@dataclass(frozen=True, slots=True)
class AcceptedAs:
    """How a request was accepted before its stream was lost."""

    prompt_tokens: int
    """Of its prompt as it was computed."""
    max_tokens: int | None
    """What max_tokens was lowered to, if it was."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request, right in itself; what depends on the model is checked when it is admitted."""

    request_id: str
    model: str
    """Empty: the one model that is served."""
    prompt: TextPrompt | ChatPrompt | TokenPrompt
    sampling: SamplingParams
    terms: ServiceTerms = ServiceTerms()
    resumed: Mapping[int, ResumedChoice] = field(default_factory=dict)
    finished_choices: frozenset[int] = frozenset()
    """Choices that had ended before."""
    accepted_as: AcceptedAs | None = None
    """Set only for a request that may be trimmed."""
    return_token_ids: bool = False
    skip_text: bool = False
    keep_special_tokens: bool = False
    thinking_token_budget: int | None = None
    truncate_to: int | None = None
    """Last tokens of the prompt to keep; -1: as many as fit."""
    stream_interval: int = 1
    """Tokens of a delta at least, but for the first and the last of a choice."""
    scored_tokens: int = 0
    """Tokens of the prompt whose log probabilities the client has."""
    pooling: Pooling | None = None
    """The vector of the prompt is wanted, and no output."""

    @property
    def is_silent(self) -> bool:
        """Whether nothing is generated: it only wants to know something of its prompt."""
        return self.pooling is not None or self.sampling.max_tokens == 0


# Requests


def generate_from_proto(message: pb.GenerateRequest) -> GenerateCall:
    """Return the request.

    Raises:
        ServiceError: fields are wrong; each is named.
    """
    violations: Violations = []
    if len(message.request_id) > MAX_REQUEST_ID:
        violations.append(("request_id", f"must have at most {MAX_REQUEST_ID} characters"))
    sampling = _sampling(message.sampling, violations)
    call = GenerateCall(
        request_id=message.request_id or uuid.uuid4().hex,
        model=message.model,
        prompt=_prompt(message, violations),
        sampling=sampling,
        terms=_terms(message.terms, violations),
        resumed=_resumed(message.resume, sampling.n or 1, violations),
        finished_choices=frozenset(one.choice for one in message.resume if one.finished),
        accepted_as=_accepted_as(message, violations),
        return_token_ids=message.return_token_ids,
        skip_text=message.skip_text,
        keep_special_tokens=message.keep_special_tokens,
        thinking_token_budget=_thinking_budget(message, violations),
        truncate_to=_truncate_to(message, violations),
        stream_interval=max(1, message.stream_interval),
        scored_tokens=message.scored_tokens,
        pooling=_pooling(message, violations),
    )
    if violations:
        raise ServiceError.invalid(*violations)
    return call


def _truncate_to(message: pb.GenerateRequest, violations: Violations) -> int | None:
    if not message.HasField("truncate_prompt_tokens"):
        return None
    kept = message.truncate_prompt_tokens
    if kept < -1 or kept == 0:
        violations.append(("truncate_prompt_tokens", f"must be -1 or at least 1, got {kept}"))
    return kept


def _pooling(message: pb.GenerateRequest, violations: Violations) -> Pooling | None:
    if not message.HasField("embedding"):
        return None
    if message.sampling.HasField("prompt_logprobs"):
        violations.append(("sampling.prompt_logprobs", "does not go with embedding"))
    if message.sampling.n > 1:
        violations.append(("sampling.n", "must be 1 with embedding"))
    try:
        return pooling_from_proto(message.embedding.pooling, "embedding.pooling")
    except ProtocolError as error:
        violations.append((error.field, f"unknown value {message.embedding.pooling}"))
        return None


def _thinking_budget(message: pb.GenerateRequest, violations: Violations) -> int | None:
    if not message.HasField("thinking_token_budget"):
        return None
    if message.thinking_token_budget >= 2**31:
        violations.append(("thinking_token_budget", f"must be below {2**31}"))
    if message.WhichOneof("input") != "chat":
        violations.append(("thinking_token_budget", "is for chats only"))
    return message.thinking_token_budget


def _prompt(message: pb.GenerateRequest, violations: Violations) -> TextPrompt | ChatPrompt | TokenPrompt:
    match message.WhichOneof("input"):
        case "text":
            # Read once: each time makes a new string.
            text = message.text
            if not text:
                violations.append(("text", "must not be empty"))
            return TextPrompt(text)
        case "tokens":
            if not message.tokens.ids:
                violations.append(("tokens.ids", "must not be empty"))
            return TokenPrompt(message.tokens.SerializeToString())
        case "chat":
            if not message.chat.messages:
                violations.append(("chat.messages", "must not be empty"))
            return ChatPrompt(message.chat.SerializeToString())
        case None:
            violations.append(("input", "one of text, tokens and chat must be set"))
            return TextPrompt("")


def _sampling(message: common_pb2.SamplingParams, violations: Violations) -> SamplingParams:
    try:
        sampling = sampling_from_proto(message)
    except ProtocolError as error:
        violations.append((f"sampling.{error.field}", str(error).removeprefix(f"{error.field}: ")))
        return SamplingParams()
    violations += [(f"sampling.{name}", problem) for name, problem in sampling.violations()]
    if sampling.structured is not None and (problem := problem_of(sampling.structured)) is not None:
        violations.append((f"sampling.structured.{problem[0]}", problem[1]))
    return sampling


def _terms(message: pb.ServiceTerms, violations: Violations) -> ServiceTerms:
    def seconds(name: str) -> float | None:
        return getattr(message, name) / 1000 if message.HasField(name) else None  # type: ignore[arg-type]  # a field's name

    try:
        priority = Priority(message.priority or Priority.STANDARD)
    except ValueError:
        violations.append(("terms.priority", f"unknown value {message.priority}"))
        priority = Priority.STANDARD
    for name in ("ttft_deadline_ms", "deadline_ms"):
        if seconds(name) == 0:
            violations.append((f"terms.{name}", "must be positive"))
    if len(message.cache_salt) > MAX_CACHE_SALT:
        violations.append(("terms.cache_salt", f"must have at most {MAX_CACHE_SALT} characters"))
    if abs(message.order) > MAX_ORDER:
        violations.append(("terms.order", f"must be in [-{MAX_ORDER}, {MAX_ORDER}], got {message.order}"))
    return ServiceTerms(
        priority=priority,
        queue_timeout_s=seconds("queue_timeout_ms"),
        ttft_deadline_s=seconds("ttft_deadline_ms"),
        deadline_s=seconds("deadline_ms"),
        cache_salt=message.cache_salt,
        may_trim=message.may_trim,
        keep_head_tokens=message.keep_head_tokens,
        keep_tail_tokens=message.keep_tail_tokens,
        may_shed=message.may_shed,
        order=message.order,
    )


def _resumed(
    messages: Sequence[pb.ResumedChoice], choices: int, violations: Violations
) -> dict[int, ResumedChoice]:
    resumed: dict[int, ResumedChoice] = {}
    for index, message in enumerate(messages):
        if message.choice >= choices:
            violations.append(
                (f"resume[{index}].choice", f"must be below n ({choices}), got {message.choice}")
            )
        elif message.choice in resumed:
            violations.append((f"resume[{index}].choice", f"choice {message.choice} is named twice"))
        elif message.finished:
            continue
        elif message.token_ids:
            resumed[message.choice] = ResumedChoice(tuple(message.token_ids[:]), message.shown_bytes)
        elif message.shown_bytes:
            violations.append((f"resume[{index}].shown_bytes", "there is no text without tokens"))
    return resumed


def _accepted_as(message: pb.GenerateRequest, violations: Violations) -> AcceptedAs | None:
    if not message.HasField("accepted_as"):
        return None
    before = message.accepted_as
    clamped = before.clamped_max_tokens if before.HasField("clamped_max_tokens") else None
    if before.prompt_tokens == 0:
        violations.append(("accepted_as.prompt_tokens", "must be positive"))
    if clamped == 0:
        violations.append(("accepted_as.clamped_max_tokens", "must be positive"))
    return AcceptedAs(before.prompt_tokens, clamped) if message.terms.may_trim else None


# Events


def accepted_to_proto(
    accepted: RequestAccepted, *, request_id: str, prompt_tokens: int, seed: int
) -> pb.Accepted:
    """Convert; `request_id` is the client's name for it."""
    return pb.Accepted(
        request_id=request_id,
        queue_position=accepted.queue_position,
        estimated_wait_ms=(
            round(accepted.estimated_wait_s * 1000) if accepted.estimated_wait_s is not None else None
        ),
        prompt_tokens=prompt_tokens,
        level=accepted.level,
        seed=seed,
    )


def timings_to_proto(timings: ChoiceTimings) -> common_pb2.Timings:
    """Convert; a choice without a token has no TTFT, and 0 stands for it."""
    return common_pb2.Timings(
        queue_ms=timings.queue_s * 1000,
        ttft_ms=(timings.ttft_s or 0.0) * 1000,
        tpot_ms=timings.tpot_s * 1000,
        total_ms=timings.total_s * 1000,
        preemptions=timings.preemptions,
        recoveries=timings.recoveries,
    )


def fill_finished(message: pb.Finished, finish: FinishChoice, usage: common_pb2.Usage, seed: int) -> None:
    """Fill in how a choice ended."""
    message.choice = finish.choice
    message.reason = finish_reason_to_proto(finish.reason)
    message.usage.CopyFrom(usage)
    message.timings.CopyFrom(timings_to_proto(finish.timings))
    message.seed = seed
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    if finish.error is not None:
        message.error.CopyFrom(ServiceError.from_core(finish.error).to_proto())


def logprobs_with_text(
    logprobs: Sequence[TokenLogprobs], text_of: Callable[[int], bytes]
) -> Iterator[common_pb2.TokenLogprobs]:
    """Yield the log probabilities of some tokens, with the text of each token."""
    for entry in logprobs:
        proto = logprobs_to_proto(entry)
        proto.token_bytes = text_of(entry.token_id)
        proto.top_token_bytes.extend(map(text_of, entry.top_token_ids))
        yield proto
