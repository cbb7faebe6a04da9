"""Types of the SDK on one side, `octavo.v1` on the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Final, cast

from octavo.errors import ErrorInfo, FieldViolation, InvalidRequestError
from octavo.keys import QUOTAS, Quotas
from octavo.parsing.events import Content
from octavo.parsing.formats import THOUGHTS_AS_TEXT
from octavo.parsing.output import OutputForm, parse
from octavo.protocol.bounds import MAX_MESSAGE_BYTES
from octavo.protocol.convert_sampling import sampling_to_proto
from octavo.protocol.scalars import Scalars, given
from octavo.protocol.steps import FinishReason, Pooling, Priority, TokenLogprobs
from octavo.sampling import OF_MODEL, SamplingParams
from octavo.status import (
    HistoryPoint,
    OverloadStatus,
    PinStatus,
    PlanLogStatus,
    PoolStatus,
    QueueStatus,
    Rates,
    Status,
    TenantStatus,
    TenantUsage,
    UsagePeriod,
    UsageReport,
    WorkerStatus,
)
from octavo.structured import of_response_format
from octavo.types import (
    Accepted,
    BatchItem,
    ChatMessage,
    GenerateResult,
    Messages,
    ModelInfo,
    Prompt,
    Timings,
    Usage,
    WorkerAudit,
)
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

_SAMPLING: Final = frozenset(field.name for field in fields(SamplingParams))
_TUPLES: Final = frozenset({"stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"})
_SECONDS: Final = ("queue_timeout", "ttft_deadline", "deadline")
_TERMS: Final = ("may_trim", "keep_head_tokens", "keep_tail_tokens", "may_shed", "cache_salt", "order")
_PLAIN: Final = (
    *("model", "request_id", "skip_text", "keep_special_tokens", "api_key"),
    *("truncate_prompt_tokens", "stream_interval", "thinking_token_budget"),
)
_POOL: Final = Scalars(PoolStatus, operations_pb2.PoolStatus)
_TENANT: Final = Scalars(TenantStatus, operations_pb2.TenantStatus, "quotas")
_CHAT: Final = ("tools", "template_vars", "add_generation_prompt", "continue_final_message", "documents")


def text_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the request for text or token ids.

    Raises:
        InvalidRequestError: a value is out of range; every such field is named.
        TypeError: an option is unknown or of the wrong type.
    """
    request = _request(options)
    if isinstance(prompt, bytes | bytearray | memoryview):  # Its items are integers, as token ids are.
        raise InvalidRequestError.of_fields(
            ("text", "must be text or token ids, got bytes: decode them first")
        )
    if isinstance(prompt, str):
        with naming("text"):
            request.text = prompt
    else:
        with naming("tokens.ids"):
            request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()
    return request


def embed_requests(inputs: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> list[pb.GenerateRequest]:
    """Return a request for each input: a text, or token ids, is one; raises as `text_request` does."""
    given = {"pooling": "last", "skip_text": True, **options}
    if isinstance(inputs, str) or not inputs or isinstance(inputs[0], int):
        return [text_request(cast("Prompt", inputs), given)]
    return [text_request(prompt, given) for prompt in cast("Sequence[Prompt]", inputs)]


def chat_request(messages: Messages, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the request for a conversation; raises as `text_request` does."""
    own = {name: options[name] for name in _CHAT if name in options}
    request = _request({name: value for name, value in options.items() if name not in own})
    request.chat.CopyFrom(chat(messages, own))
    return request


def pin_request(
    name: str, prefix: Prompt | Messages, options: Mapping[str, Any]
) -> operations_pb2.PinPrefixRequest:
    """Return the request to pin text, token ids, or the beginning of a conversation.

    Raises:
        InvalidRequestError: a value is out of range; the field is named.
    """
    request = operations_pb2.PinPrefixRequest()
    for field, value in {"name": name, **options}.items():
        if field not in _CHAT and value is not None:
            with naming(field):
                setattr(request, field, value)
    turns = not isinstance(prefix, str) and any(isinstance(one, ChatMessage | Mapping) for one in prefix)
    template = {field: options[field] for field in _CHAT if field in options}
    if turns or template:
        request.chat.CopyFrom(chat(cast("Messages", prefix), template))
    elif isinstance(prefix, str):
        with naming("text"):
            request.text = prefix
    else:
        with naming("tokens.ids"):
            request.tokens.ids.extend(cast("Sequence[int]", prefix))
        request.tokens.SetInParent()
    check_size(request)
    return request


def batch_request(item: Prompt | BatchItem, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the request for one of a batch.

    Raises:
        InvalidRequestError: a value is out of range, or, of an item with its own options, unknown or
            of the wrong type: those come from a file more often than from a program.
    """
    if not isinstance(item, BatchItem):
        return text_request(item, options)
    options = {**options, **item.options}
    try:
        if item.is_chat:
            return chat_request(cast("Messages", item.input), options)
        return text_request(cast("Prompt", item.input), options)
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError.of_fields(("options", str(error))) from None


def chat(messages: Messages, options: Mapping[str, Any]) -> pb.Chat:
    """Return a conversation with the options of its template."""
    message = pb.Chat()
    turns: Iterable[Any] = [ChatMessage("user", messages)] if isinstance(messages, str) else messages
    for index, turn in enumerate(turns):
        one = turn if isinstance(turn, ChatMessage) else _turn(index, turn)
        proto = message.messages.add()
        path = f"chat.messages[{index}]"
        for name in ("role", "content", "name", "tool_call_id", "reasoning"):
            value = getattr(one, name)
            if value is not None:
                with naming(f"{path}.{name}"):
                    setattr(proto, name, value)
        if one.tool_calls:
            proto.tool_calls_json = _json(f"{path}.tool_calls_json", list(one.tool_calls))
    message.SetInParent()
    if options.get("tools"):
        message.tools_json = _json("chat.tools_json", list(options["tools"]))
    if options.get("template_vars"):
        message.template_vars_json = _json("chat.template_vars_json", dict(options["template_vars"]))
    if options.get("add_generation_prompt") is not None:
        message.add_generation_prompt = options["add_generation_prompt"]
    if options.get("continue_final_message"):
        message.continue_final_message = True
    if options.get("documents"):
        message.documents_json = _json("chat.documents_json", list(options["documents"]))
    return message


def _json(field: str, value: object) -> str:
    """Return JSON, which has no word for NaN and infinity; names the field of a value that is one."""
    with naming(field):
        return json.dumps(value, allow_nan=False)


def _turn(index: int, turn: Mapping[str, Any]) -> ChatMessage:
    try:
        return ChatMessage(**turn)
    except TypeError as error:
        raise InvalidRequestError.of_fields(
            (f"chat.messages[{index}]", f"must have role and content ({error})")
        ) from None


def _request(options: Mapping[str, Any]) -> pb.GenerateRequest:
    request = pb.GenerateRequest(return_token_ids=True)
    own = {"sampling", "response_format", "priority", "pooling", *_SECONDS, *_TERMS, *_PLAIN}
    unknown = options.keys() - _SAMPLING - own
    if unknown:
        raise TypeError(f"unknown option {min(unknown)!r}")
    for name in _PLAIN:
        if options.get(name) is not None:
            with naming(name):
                setattr(request, name, options[name])
    sampling = _sampling(options)
    if sampling is not None:
        with naming("sampling"):
            request.sampling.CopyFrom(sampling_to_proto(sampling))
    for name in _SECONDS:
        if options.get(name) is not None:
            setattr(request.terms, f"{name}_ms", milliseconds(f"terms.{name}_ms", options[name]))
    for name in _TERMS:
        if options.get(name) is not None:
            with naming(f"terms.{name}"):
                setattr(request.terms, name, options[name])
    if options.get("pooling") is not None:
        request.embedding.pooling = _pooling(options["pooling"])
    if options.get("priority") is not None:
        request.terms.priority = cast("common_pb2.Priority.ValueType", _priority(options["priority"]).value)
    return request


def parsed(result: GenerateResult, options: Mapping[str, Any]) -> GenerateResult:
    """Return a result with the instance that the options asked for."""
    wanted: Any = options.get("response_format")
    if result.finish_reason is not FinishReason.STOP or not hasattr(wanted, "model_validate_json"):
        return result
    found = parse(
        result.text, OutputForm(reasoning_format=THOUGHTS_AS_TEXT), in_reasoning=result.in_reasoning
    )
    words = "".join(part.text for part in found if part.kind is Content)
    return replace(result, parsed=wanted.model_validate_json(words))


def _sampling(options: Mapping[str, Any]) -> SamplingParams | None:
    given = {name: options[name] for name in _SAMPLING & options.keys() if options[name] is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in _TUPLES & given.keys():
        given[name] = tuple(given[name])
    if "bad_words_token_ids" in given:
        given["bad_words_token_ids"] = tuple(map(tuple, given["bad_words_token_ids"]))
    if (wanted := options.get("response_format")) is not None:
        try:
            given["structured"] = of_response_format(wanted)
        except ValueError as error:
            raise InvalidRequestError.of_fields(("response_format", str(error))) from None
    sampling: SamplingParams | None = options.get("sampling")
    if given:
        sampling = replace(sampling or SamplingParams(), **given)
    if sampling is not None:
        wrong = sampling.violations()
        if wrong:
            raise InvalidRequestError.of_fields(*((f"sampling.{name}", what) for name, what in wrong))
    return sampling


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Name the field when a value does not fit into it."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidRequestError.of_fields((field, "is not valid UTF-8 text")) from None
    except ValueError as error:
        raise InvalidRequestError.of_fields((field, f"is out of range ({error})")) from None


def milliseconds(field: str, seconds: float) -> int:
    """Return a time span as the field has it, or refuse it by the name of the field."""
    value = seconds * 1000
    if not math.isfinite(value) or not 0 <= value < 2**32:
        problem = f"must be between 0 and {2**32 // 1000} seconds, got {seconds}"
        raise InvalidRequestError.of_fields((field, problem))
    return math.ceil(value)


def _pooling(value: str) -> common_pb2.Pooling.ValueType:
    try:
        return common_pb2.Pooling.ValueType(Pooling[value.upper()])
    except KeyError:
        names = " or ".join(one.name.lower() for one in Pooling)
        raise InvalidRequestError.of_fields(
            ("embedding.pooling", f"must be {names}, got {value!r}")
        ) from None


def _priority(value: Priority | str) -> Priority:
    if isinstance(value, Priority):
        return value
    try:
        return Priority[value.upper()]
    except KeyError:
        names = ", ".join(one.name.lower() for one in Priority)
        raise InvalidRequestError.of_fields(
            ("terms.priority", f"must be one of {names}, got {value!r}")
        ) from None


def check_size(request: pb.GenerateRequest | operations_pb2.PinPrefixRequest) -> None:
    """Refuse a message that would end the stream it shares with other requests."""
    size = request.ByteSize()
    # Room for the wrapper, and for the tokens that a resumed request carries on top.
    if size > MAX_MESSAGE_BYTES - 64 * 1024:
        raise InvalidRequestError.of_fields(
            (
                str(request.WhichOneof("input")),
                f"the request takes {size} bytes, more than {MAX_MESSAGE_BYTES} at most",
            ),
            reason="MESSAGE_TOO_LARGE",
        )


def error_info(message: common_pb2.Error) -> ErrorInfo:
    """Return what an error event says."""
    return ErrorInfo(
        reason=message.reason,
        message=message.message,
        code=message.code,
        retry_after_s=message.retry_delay_ms / 1000 if message.HasField("retry_delay_ms") else None,
        violations=tuple(FieldViolation(one.field, one.description) for one in message.violations),
        metadata=dict(message.metadata),
    )


def accepted(message: pb.Accepted) -> Accepted:
    """Convert."""
    waits = message.HasField("estimated_wait_ms")
    return Accepted(
        queue_position=message.queue_position,
        estimated_wait_s=message.estimated_wait_ms / 1000 if waits else None,
        prompt_tokens=message.prompt_tokens,
        level=message.level,
        seed=message.seed,
        trimmed_tokens=message.trimmed_tokens,
        clamped_max_tokens=given(message, "clamped_max_tokens"),
        in_reasoning=message.in_reasoning,
    )


def logprobs(messages: Iterable[common_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Convert the log probabilities of some positions."""
    return [
        TokenLogprobs(
            one.token_id,
            one.logprob,
            one.rank,
            tuple(one.top_token_ids),
            tuple(one.top_logprobs),
            one.token_bytes,
            tuple(one.top_token_bytes),
        )
        for one in messages
    ]


def usage(message: common_pb2.Usage) -> Usage:
    """Convert."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        trimmed_tokens=message.trimmed_tokens,
        clamped_max_tokens=given(message, "clamped_max_tokens"),
    )


def timings(message: common_pb2.Timings) -> Timings:
    """Convert."""
    return Timings(
        queue_s=message.queue_ms / 1000,
        ttft_s=message.ttft_ms / 1000,
        tpot_s=message.tpot_ms / 1000,
        total_s=message.total_ms / 1000,
        preemptions=message.preemptions,
        recoveries=message.recoveries,
    )


def model_info(message: pb.Model) -> ModelInfo:
    """Convert."""
    return ModelInfo(
        id=message.id,
        revision=message.revision,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        adapters=tuple(message.adapters),
        workers=message.workers,
        generation_defaults=_defaults(message.generation_defaults),
        aliases=tuple(message.aliases),
        tool_format=message.tool_format,
        reasoning_format=message.reasoning_format,
    )


def _defaults(message: common_pb2.SamplingParams) -> dict[str, float]:
    """Return what is set, as somebody wrote it: 0.2 travels as a float32, which is 0.200000003."""
    values = {name: given(message, name) for name in OF_MODEL}
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }


def status(message: operations_pb2.Status) -> Status:
    """Convert."""
    return Status(
        scheduler_id=message.scheduler_id,
        version=message.version,
        uptime_s=message.uptime_s,
        level=message.level,
        draining=message.draining,
        queues=tuple(
            QueueStatus(
                one.model,
                _queue_priority(one.priority),
                one.waiting,
                one.waiting_tokens,
                one.oldest_wait_ms / 1000,
            )
            for one in message.queues
        ),
        workers=tuple(_worker(one) for one in message.workers),
        outcomes=dict(message.outcomes),
        arrivals=message.arrivals,
        live_requests=message.live_requests,
        rates=_rates(message.rates),
        history=tuple(
            HistoryPoint(
                one.uptime_s, one.level, one.live_requests, one.waiting, one.running, _rates(one.rates)
            )
            for one in message.history
        ),
        tenants=tuple(_tenant(one) for one in message.tenants),
        overload=tuple(_overload(one) for one in message.overload),
        key_file_problem=given(message, "key_file_problem"),
        log_lines_dropped=message.log_lines_dropped,
        plan_log=_plan_log(message.plan_log) if message.HasField("plan_log") else None,
        rss_bytes=message.rss_bytes,
        max_rss_bytes=message.max_rss_bytes,
        pins=tuple(PinStatus(one.name, one.model, one.blocks, tuple(one.workers)) for one in message.pins),
        models=tuple(model_info(one) for one in message.models),
        rank=message.rank,
        endpoint=message.endpoint,
        standby=given(message, "standby"),
        idle_device_s=message.idle_device_s,
        unassigned_device_s=message.unassigned_device_s,
    )


def usage_report(message: operations_pb2.GetUsageResponse) -> UsageReport:
    """Convert."""
    return UsageReport(tuple(map(_usage_period, message.minutes)), given(message, "price_per_gpu_hour"))


def _usage_period(message: operations_pb2.UsageMinute) -> UsagePeriod:
    tenants = (
        TenantUsage(one.tenant, one.requests, one.prompt_tokens, one.output_tokens, one.device_s)
        for one in message.tenants
    )
    return UsagePeriod(
        message.from_unix_ms / 1000,
        message.until_unix_ms / 1000,
        tuple(tenants),
        message.idle_device_s,
        message.unassigned_device_s,
    )


def _plan_log(message: operations_pb2.PlanLogStatus) -> PlanLogStatus:
    return PlanLogStatus(message.path, message.entries_missed, given(message, "problem"))


def _queue_priority(value: int) -> Priority | None:
    try:
        return Priority(value or Priority.STANDARD)
    except ValueError:
        return None


def audit(message: operations_pb2.WorkerAudit) -> WorkerAudit:
    """Convert."""
    return WorkerAudit(
        worker_id=message.worker_id,
        violation=given(message, "violation"),
        problem=given(message, "problem"),
        blocks=message.blocks,
        check_s=message.check_ms / 1000,
    )


def _rates(message: operations_pb2.Rates) -> Rates:
    priced = message.HasField("cost_per_1k_tokens")
    return Rates(
        requests_per_s=message.requests_per_s,
        prompt_tokens_per_s=message.prompt_tokens_per_s,
        output_tokens_per_s=message.output_tokens_per_s,
        ttft_p50_s=message.ttft_p50_ms / 1000,
        ttft_p99_s=message.ttft_p99_ms / 1000,
        queue_p50_s=message.queue_p50_ms / 1000,
        queue_p99_s=message.queue_p99_ms / 1000,
        cost_per_1k_tokens=message.cost_per_1k_tokens if priced else None,
        itl_p50_s=message.itl_p50_ms / 1000,
        itl_p99_s=message.itl_p99_ms / 1000,
        refused_per_s=message.refused_per_s,
    )


def _overload(message: operations_pb2.OverloadStatus) -> OverloadStatus:
    wait_ms, ttft_ms = given(message, "predicted_wait_ms"), given(message, "predicted_ttft_ms")
    return OverloadStatus(
        model=message.model,
        level=message.level,
        half_open=message.half_open,
        backlog=message.backlog,
        backlog_interactive=message.backlog_interactive,
        wait=message.wait,
        wait_interactive=message.wait_interactive,
        blocks=message.blocks,
        misses=message.misses,
        stalled_s=message.stalled_ms / 1000,
        predicted_wait_s=wait_ms / 1000 if wait_ms is not None else None,
        predicted_ttft_s=ttft_ms / 1000 if ttft_ms is not None else None,
        trim_prompt_tokens=given(message, "trim_prompt_tokens"),
        trim_max_tokens=given(message, "trim_max_tokens"),
    )


def _tenant(message: operations_pb2.TenantStatus) -> TenantStatus:
    quotas = Quotas(**{name: given(message.quotas, name) for name in QUOTAS})
    return _TENANT.from_proto(message, quotas=quotas)


def _worker(message: operations_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=message.worker_id,
        address=message.address,
        model=message.model,
        state=message.state,
        running=message.running,
        pool=_POOL.from_proto(message.pool),
        step_s=message.step_ms / 1000,
        bubble_share=message.bubble_share,
        steps=message.steps,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        runner=message.runner,
        devices=message.devices,
        limits_reason=message.limits_reason,
        held_by=message.held_by,
        held_by_endpoint=message.held_by_endpoint,
    )
