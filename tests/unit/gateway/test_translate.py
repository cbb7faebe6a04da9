"""Bodies and headers of HTTP become the options of the SDK that they mean."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from octavo import errors
from octavo._sdk import requests
from octavo.gateway import tools, translate
from octavo.gateway.dialects import messages_body, responses_body
from octavo.gateway.errors import GatewayError, failure_of, failure_of_validation
from octavo.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
    Strict,
    StructuredOutputs,
    TokenizeRequest,
)
from octavo.sampling import SamplingParams, StructuredOutput
from pydantic import ValidationError


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **body})


def chat(**body: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **body})


def options(request: CompletionRequest, **headers: str) -> dict[str, Any]:
    return dict(translate.completion_options(request, headers))


def test_sampling_parameters_arrive_as_they_were_meant() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "n": 2,
        "min_tokens": 1,
        "max_tokens": 7,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "logprobs": 2,
    }
    found = options(completion(**given, seed=-1, stop=["a"], logit_bias={"7": 2.5}))

    assert {name: found[name] for name in given} == given
    assert found["seed"] == 2**64 - 1
    assert found["stop"] == ["a"]
    assert found["logit_bias"] == {7: 2.5}
    request = requests.text_request("x", found)
    assert SamplingParams(seed=request.sampling.seed).violations() == []


def test_what_a_body_leaves_out_is_left_to_the_model() -> None:
    found = options(completion())

    assert found == {"api_key": "", "n": 1, "max_tokens": 16}
    assert translate.chat_job(chat(), {}).options == {"api_key": "", "n": 1}


TURNS = [{"role": "user", "content": "x"}]
LEAST: dict[type[Strict], dict[str, Any]] = {
    responses_body.AllowedTools: {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "x"}],
    },
    responses_body.ChosenTool: {"type": "function", "name": "x"},
    responses_body.FunctionTool: {"type": "function", "name": "x"},
    responses_body.InputItem: {"role": "user", "content": "x"},
    responses_body.InputPart: {"type": "input_text", "text": "x"},
    responses_body.ReasoningOptions: {},
    responses_body.ResponsesRequest: {"input": "x"},
    responses_body.TextFormat: {"type": "text"},
    responses_body.TextOptions: {},
    messages_body.ContentBlock: {"type": "text", "text": "x"},
    messages_body.CountTokensRequest: {"model": "m", "messages": TURNS},
    messages_body.InputTool: {"name": "x", "input_schema": {}},
    messages_body.InputToolChoice: {"type": "auto"},
    messages_body.MessagesRequest: {"model": "m", "messages": TURNS, "max_tokens": 1},
    messages_body.Metadata: {},
    messages_body.OutputConfig: {},
    messages_body.OutputFormat: {"type": "json_schema", "schema": {}},
    messages_body.TextBlock: {"type": "text", "text": "x"},
    messages_body.Thinking: {"type": "enabled"},
    messages_body.Turn: TURNS[0],
    tools.Function: {"name": "x"},
    tools.FunctionName: {"name": "x"},
    tools.NamedTool: {"type": "function", "function": {"name": "x"}},
    tools.Tool: {"type": "function", "function": {"name": "x"}},
    ChatRequest: {"messages": TURNS},
    CompletionRequest: {"prompt": "x"},
    ContentPart: {"type": "text", "text": "x"},
    DetokenizeRequest: {"tokens": [1]},
    JsonSchema: {"schema": {"a": 1}},
    Message: {"role": "user", "content": "x"},
    ResponseFormat: {"type": "text"},
    StreamOptions: {},
    StructuredOutputs: {"json": {"a": 1}},
    TokenizeRequest: {"prompt": "x"},
    EmbeddingRequest: {"input": "x"},
}
"""A body of each kind, with little more than it needs."""


def bodies(kind: type[Strict] = Strict) -> Iterator[type[Strict]]:
    for inner in kind.__subclasses__():
        yield from (inner, *bodies(inner))


@pytest.mark.parametrize("kind", sorted(set(bodies()) - {GenerationRequest}, key=lambda kind: kind.__name__))
def test_null_is_the_same_as_leaving_a_parameter_out(kind: type[Strict]) -> None:
    nullable = kind.model_json_schema()["properties"]

    def outcome(body: dict[str, Any]) -> Any:
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            return [(one["type"], one["loc"]) for one in error.errors()]

    for attribute, field in kind.model_fields.items():
        name = field.alias or attribute
        without = {key: value for key, value in LEAST[kind].items() if key != name}
        if not field.is_required():
            assert outcome({**without, name: None}) == outcome(without), name
            assert {"type": "null"} in nullable[name].get("anyOf", []), name


def test_max_tokens_null_and_left_out_are_the_same() -> None:
    assert options(completion(max_tokens=None))["max_tokens"] == 16
    assert (
        "max_tokens" not in translate.chat_job(chat(max_tokens=None, max_completion_tokens=None), {}).options
    )


def test_top_k_of_vllm_and_special_tokens() -> None:
    found = options(completion(top_k=-1, skip_special_tokens=False, cache_salt="s"))

    assert (found["top_k"], found["keep_special_tokens"], found["cache_salt"]) == (0, True, "s")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            StructuredOutput(json_schema='{"a": 1}'),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"json": {"a": 1}}}, StructuredOutput(json_schema='{"a": 1}')),
    ],
)
def test_structured_output_in_both_dialects(body: dict[str, Any], expected: StructuredOutput | None) -> None:
    assert options(completion(**body)).get("structured") == expected


def test_service_terms_come_by_header() -> None:
    headers = {
        "x-octavo-priority": "Batch",
        "x-octavo-queue-timeout-ms": "0",
        "x-octavo-ttft-deadline-ms": "1500",
        "x-octavo-deadline-ms": "2500",
        "x-octavo-degrade": "may_trim, may_shed",
        "x-octavo-keep-head-tokens": "5",
        "x-octavo-keep-tail-tokens": "6",
        "authorization": "Bearer secret",
        "accept": "*/*",
    }
    found = translate.completion_options(completion(), headers)
    terms = requests.text_request("x", found).terms

    assert (terms.priority, terms.ttft_deadline_ms, terms.deadline_ms) == (3, 1500, 2500)
    assert terms.HasField("queue_timeout_ms")
    assert terms.queue_timeout_ms == 0
    assert (terms.may_trim, terms.may_shed) == (True, True)
    assert (terms.keep_head_tokens, terms.keep_tail_tokens) == (5, 6)
    assert found["api_key"] == "secret"


def test_a_request_without_a_key_says_so_and_lends_none() -> None:
    found = translate.completion_options(completion(), {"authorization": "Basic eA=="})
    request = requests.text_request("x", found)

    assert request.HasField("api_key")
    assert request.api_key == ""


@pytest.mark.parametrize(("value", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"])])
def test_prompts_are_texts_or_tokens_one_or_many(value: Any, prompts: list[Any]) -> None:
    assert translate.prompts(completion(prompt=value).prompt) == prompts
    assert translate.prompts(completion(prompt=[[1], [2, 3]]).prompt) == [[1], [2, 3]]


def test_chat_parts_are_joined_and_tool_calls_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        chat_template_kwargs={"thinking": False},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=9,
    )
    job = translate.chat_job(request, {})
    proto = requests.chat_request(job.messages, job.options)

    assert proto.chat.messages[0].content == "a\nb"
    assert json.loads(proto.chat.messages[1].tool_calls_json) == [call]
    assert proto.chat.messages[2].tool_call_id == "1"
    assert json.loads(proto.chat.template_vars_json) == {"thinking": False}
    assert (proto.sampling.logprobs, proto.sampling.max_tokens) == (3, 9)


def test_every_unsupported_parameter_is_refused_unless_it_asks_for_nothing() -> None:
    for kind, make in ((CompletionRequest, completion), (ChatRequest, chat)):
        for name, neutral in kind.neutral.items():
            for value in neutral:
                make(**{name: value})
            with pytest.raises(ValidationError) as caught:
                make(**{name: {"something": "else"}})
            failure = failure_of_validation(caught.value.errors())
            assert (failure.status, failure.param, failure.code) == (400, name, "unsupported_parameter")


def test_several_faults_are_all_named() -> None:
    with pytest.raises(ValidationError) as caught:
        completion(temperature=-1, nonsense=2, suffix=None, n=0)
    failure = failure_of_validation(caught.value.errors())

    for name in ("temperature", "nonsense", "n: "):
        assert name in failure.message


def test_headers_that_are_wrong_are_named() -> None:
    for name, value in (("x-octavo-priority", "now"), ("x-octavo-deadline-ms", "-1"), ("x-octavo-x", "1")):
        with pytest.raises(GatewayError) as caught:
            translate.terms({name: value})
        assert caught.value.failure.param == name


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        ("INVALID_REQUEST", 3, 400),
        ("PROMPT_TOO_LONG", 3, 400),
        ("UNSUPPORTED", 12, 400),
        ("NO_API_KEY", 16, 401),
        ("ROLE_REQUIRED", 7, 403),
        ("UNKNOWN_MODEL", 5, 404),
        ("QUEUE_TIMEOUT", 4, 408),
        ("DUPLICATE_REQUEST_ID", 6, 409),
        ("MESSAGE_TOO_LARGE", 3, 413),
        ("QUEUE_FULL", 8, 429),
        ("STEP_FAILED", 13, 500),
        ("POISON", 10, 500),
        ("NO_WORKER", 14, 503),
        ("DRAINING", 14, 503),
        ("SLOW_CONSUMER", 8, 503),
        ("CANCELLED", 1, 503),
    ],
)
def test_reasons_have_the_status_that_clients_act_on(reason: str, code: int, status: int) -> None:
    failure = failure_of(errors.error_of(errors.ErrorInfo(reason, "what happened", code, retry_after_s=2.2)))

    assert failure.status == status
    assert json.loads(failure.encoded())["error"]["message"] == "what happened"
    assert failure.all_headers()["retry-after"] == "3"
    assert failure.all_headers()["retry-after-ms"] == "2200"


def test_refusal_tells_the_level_of_load_when_the_service_does() -> None:
    shed = errors.ErrorInfo("SHED", "at level 3", 8, metadata={"level": "3", "waiting_requests": "9"})
    draining = errors.ErrorInfo("DRAINING", "no new requests", 14)

    assert failure_of(errors.error_of(shed)).all_headers()["x-octavo-level"] == "3"
    assert "x-octavo-level" not in failure_of(errors.error_of(draining)).all_headers()


def test_violations_are_told_in_the_words_of_the_request() -> None:
    error = errors.InvalidRequestError.of_fields(
        ("sampling.max_tokens", "many"),
        ("chat.messages[2].role", "unknown"),
        ("tokens.ids[3]", "large"),
    )
    request = chat(max_completion_tokens=5)
    failure = failure_of(error, translate.renamed(request))

    assert failure.param == "max_completion_tokens"
    assert failure.message == "max_completion_tokens: many; messages[2].role: unknown; prompt[3]: large"


def test_gateway_loads_nothing_of_the_services_and_no_torch() -> None:
    code = (
        "import sys, octavo.gateway.main; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'scheduler_svc', 'worker_svc', 'torch', 'tokenizers', 'jinja2', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
