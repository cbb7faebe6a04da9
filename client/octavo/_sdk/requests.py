"""What users give to the clients, as messages of `octavo.v1`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Final, cast

from octavo.errors import InvalidRequestError
from octavo.parsing.events import Content
from octavo.parsing.formats import THOUGHTS_AS_TEXT
from octavo.parsing.output import OutputForm, parse
from octavo.protocol.bounds import MAX_MESSAGE_BYTES
from octavo.protocol.convert_sampling import sampling_to_proto
from octavo.protocol.steps import FinishReason, Pooling, Priority
from octavo.sampling import SamplingParams
from octavo.structured import of_response_format
from octavo.types import (
    BatchItem,
    ChatMessage,
    GenerateResult,
    Messages,
    Prompt,
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
