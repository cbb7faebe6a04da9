"""A new sampling parameter, and a new finish reason, is everywhere that it has to be.

A sampling parameter touches these files, and its rows in docs/sdk.md and docs/coming-from-vllm-serve.md:

1. protos/octavo/v1/common.proto, from which `make proto` makes the generated code
2. client/octavo/sampling.py: the field, its row of `SCALARS`, its keyword in `SamplingOptions`
3. client/octavo/gateway/schemas.py: its name over HTTP
4. worker_svc/runner/torch/sampling.py: what the torch runner keeps of it, and what it does to the logits
5. worker_svc/runner/vllm/sampling.py: vLLM's name for it

A finish reason touches these, and its place in docs/sdk.md, and in docs/gateway.md when it is a complete end:

1. protos/octavo/v1/common.proto
2. client/octavo/protocol/steps.py: `FinishReason`, and whether it `is_complete`
3. client/octavo/_sdk/call.py: its error, when it is not complete
4. the place that decides it: worker_svc/engine/sequences.py or scheduler_svc/core/lifecycle.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from octavo._sdk.call import Call
from octavo._sdk.requests import text_request
from octavo.cli import generate
from octavo.cli.request import add_options, options
from octavo.errors import OctavoError
from octavo.gateway.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from octavo.gateway.translate import chat_job, completion_options
from octavo.gateway.writers import CompletionWriter, Head
from octavo.protocol.convert_sampling import sampling_from_proto, sampling_to_proto
from octavo.protocol.steps import FinishReason
from octavo.sampling import NEUTRAL, SCALARS, SamplingOptions, SamplingParams, StructuredOutput
from octavo.types import ChatOptions, GenerateOptions
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb
from pydantic import BaseModel

from worker_svc.runner.base import SequenceData
from worker_svc.runner.torch.sampling import SamplingState
from worker_svc.runner.vllm.sampling import EVERYTHING, sampling_kwargs, unsupported

DOCS = Path(__file__).parents[3] / "docs"
PARAMETERS = [one.name for one in fields(SamplingParams)]
VALUES: dict[str, Any] = {
    "logit_bias": {5: 1.0},
    "stop": ("end",),
    "stop_token_ids": (7,),
    "structured": StructuredOutput(regex="a+"),
    "ignore_eos": True,
    "allowed_token_ids": (3, 7),
    "bad_words": ("no",),
    "bad_words_token_ids": ((5,), (6, 7)),
    "include_stop_str_in_output": True,
    "logprob_token_ids": (4,),
    **{name: 0.5 for name, one in SCALARS.items() if one.kind is float},
    **{name: 3 for name, one in SCALARS.items() if one.kind is int},
}
"""A value of each parameter that asks for something."""
OPEN = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
"""Numbers without a neutral value: drawn, as the context leaves, none."""
WITHOUT_FLAG = {"n", "logprobs", "ignore_eos", "include_stop_str_in_output", "prompt_logprobs"}
"""The command line shows one choice and no log probabilities; its --ignore-eos takes no value."""
SCHEDULER = {"n", "stop", "bad_words", "include_stop_str_in_output"}
READ_OFF = {"prompt_logprobs"}
"""Of the hidden states of prompts, where the runner has them."""
ENGINE = {"max_tokens", "ignore_eos", "stop_token_ids", "structured"}
"""Conditions that end a sequence, and what has a guide made for it."""
SEEDED_BY_STEP = {"seed"}
"""The vllm runner has draws of its own; see `draw_seed`."""
IN_HTTP: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "structured": {"structured_outputs": {"regex": "a+"}},
}
"""Parameters that have another form in the body of a chat."""


class Recorder:
    """Sampling parameters that remember which of them were read."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.read: set[str] = set()
        self._sampling = sampling

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._sampling, name)


def test_every_parameter_that_is_one_number_or_flag_is_in_the_table() -> None:
    hints = get_type_hints(SamplingParams)
    one_of = ({float, NoneType}, {int, NoneType}, {bool, NoneType})
    scalars = {name: kind for name, kind in hints.items() if {*get_args(kind)} in one_of}
    assert {name: one.kind | None for name, one in SCALARS.items()} == scalars
    assert {name for name, one in SCALARS.items() if one.neutral is None} == OPEN
    assert not [name for name in {*SCALARS} - OPEN if getattr(NEUTRAL, name) is None]
    assert NEUTRAL.violations() == []


def test_every_parameter_is_in_the_contract_and_an_option_of_the_sdk() -> None:
    assert [*common_pb2.SamplingParams.DESCRIPTOR.fields_by_name] == PARAMETERS
    assert [*SamplingOptions.__annotations__] == PARAMETERS
    assert {*PARAMETERS} <= {*get_type_hints(GenerateOptions)}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_survives_the_wire(name: str) -> None:
    sampling = SamplingParams(**{name: VALUES[name]})
    assert sampling != SamplingParams()
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_goes_from_the_sdk_into_the_request(name: str) -> None:
    request = text_request("x", {name: VALUES[name]})
    assert request.sampling == sampling_to_proto(SamplingParams(**{name: VALUES[name]}))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_goes_from_http_into_the_request(name: str) -> None:
    body = IN_HTTP.get(name, {name: VALUES[name]})
    if name == "logprob_token_ids":
        body = {**body, "logprobs": True}
    chat = chat_job(ChatRequest(messages=[{"role": "user", "content": "x"}], **body), {})
    assert getattr(sampling_of(chat.options), name) == VALUES[name]
    body = {**body, "logprobs": 3} if "logprobs" in body else body
    body.pop("top_logprobs", None)
    completion = completion_options(CompletionRequest(prompt="x", **body), {})
    assert getattr(sampling_of(completion), name) == VALUES[name]


def sampling_of(asked: Any) -> SamplingParams:
    return sampling_from_proto(text_request("x", asked).sampling)


def test_every_number_has_a_flag_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    for name in {*SCALARS} - WITHOUT_FLAG:
        arguments = parser.parse_args([f"--{name.replace('_', '-')}", str(VALUES[name])])
        assert options(arguments) == {name: VALUES[name]}


def test_every_parameter_is_read_by_the_torch_runner_or_by_whom_it_concerns() -> None:
    sampling: Any = Recorder(SamplingParams(**VALUES))
    SamplingState(SequenceData(1, [1], 1, sampling), (2,), 100)
    assert sampling.read | SCHEDULER | ENGINE | READ_OFF == {*PARAMETERS}


def test_every_parameter_is_read_by_the_vllm_runner_or_by_whom_it_concerns() -> None:
    sampling: Any = Recorder(SamplingParams(**VALUES))
    sampling_kwargs(sampling, (2,), 100)
    unsupported(sampling, 100)
    assert sampling.read | SCHEDULER | ENGINE | SEEDED_BY_STEP | READ_OFF == {*PARAMETERS}


def test_vllm_warms_up_every_parameter_that_its_sampler_knows() -> None:
    idle = sampling_kwargs(SamplingParams(), (), 100)
    busy = sampling_kwargs(EVERYTHING, (2,), 100)
    fixed = {"temperature", "max_tokens", "detokenize", "skip_clone"}
    assert {name for name in idle if idle[name] == busy[name]} == fixed


@pytest.mark.parametrize("page", ["sdk.md", "coming-from-vllm-serve.md"])
def test_every_parameter_is_in_the_docs(page: str) -> None:
    text = (DOCS / page).read_text()
    names = [*IN_HTTP["structured"]] if page != "sdk.md" else ["structured"]
    wanted = [name for name in PARAMETERS if name != "structured"] + names
    assert [name for name in wanted if f"`{name}`" not in text] == []


BESIDE = {
    "terms.priority": ("", "priority"),
    "terms.order": ("priority", "order"),
    "terms.cache_salt": ("cache_salt", "cache_salt"),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", "truncate_prompt_tokens"),
    "stream_interval": ("stream_interval", "stream_interval"),
    "thinking_token_budget": ("thinking_token_budget", "thinking_token_budget"),
    "embedding.pooling": ("pooling", "pooling"),
    "chat.continue_final_message": ("continue_final_message", "continue_final_message"),
    "chat.documents_json": ("documents", "documents"),
}
"""What else there is to set: its path in a GenerateRequest, its names over HTTP and in the SDK."""
DOORS = {"completions": CompletionRequest, "chats": ChatRequest, "embeddings": EmbeddingRequest}


def row_of_docs(path: str, http: str, sdk: str) -> str:
    """Return the row of a parameter in the table of where each is; also checks that it is there."""
    message = pb.GenerateRequest.DESCRIPTOR
    for part in path.split("."):
        assert part in message.fields_by_name, path
        message = message.fields_by_name[part].message_type
    assert sdk in get_type_hints(ChatOptions)
    doors = [door for door, body in DOORS.items() if http in body.model_fields]
    parser = argparse.ArgumentParser()
    generate.configure(parser, "generate")
    flag = f"--{sdk.replace('_', '-')}"
    known = flag in parser.format_help().replace(",", " ").replace("]", " ").split()
    over_http = f"`{http}`: {', '.join(doors)}" if doors else ""
    return f"| `{path}` | {over_http} | `{sdk}` | {f'`{flag}`' if known else ''} |"


def test_docs_say_where_each_parameter_is() -> None:
    sampling = {f"sampling.{name}": (name, name) for name in PARAMETERS if name != "structured"}
    rows = [row_of_docs(path, *names) for path, names in (sampling | BESIDE).items()]
    text = (DOCS / "coming-from-vllm-serve.md").read_text()
    assert [row for row in rows if row not in text] == []


@pytest.mark.parametrize("body", DOORS.values())
def test_every_member_of_a_body_is_in_the_docs(body: type[BaseModel]) -> None:
    text = (DOCS / "coming-from-vllm-serve.md").read_text()
    assert [name for name in body.model_fields if f"`{name}" not in text] == []


# Finish reasons


def end_of(reason: FinishReason) -> Call:
    """A request of the SDK whose choice has ended for this reason."""
    call = Call(pb.GenerateRequest(request_id="r"), lambda: None)
    said = pb.Delta(text="said", token_ids=[1])
    finished = pb.Finished(reason=common_pb2.FinishReason.ValueType(reason.value))
    for event in (pb.RequestEvent(delta=said), pb.RequestEvent(finished=finished)):
        call.apply(event)
    assert call.done
    return call


def test_every_reason_is_in_the_contract() -> None:
    names = {number: name.removeprefix("FINISH_REASON_") for name, number in common_pb2.FinishReason.items()}
    assert names == {one.value: one.name if one else "UNSPECIFIED" for one in FinishReason}


@pytest.mark.parametrize("reason", FinishReason)
def test_reason_is_a_complete_end_or_an_error_of_the_sdk(reason: FinishReason) -> None:
    call = end_of(reason)
    if reason.is_complete or reason is FinishReason.UNKNOWN:
        assert call.result().choices[0].finish_reason is reason
        return
    with pytest.raises(OctavoError) as failed:
        call.result()
    assert failed.value.partial is not None
    assert failed.value.partial.text == "said"


@pytest.mark.parametrize("reason", [one for one in FinishReason if one.is_complete or not one])
def test_reason_that_is_no_error_has_a_word_over_http_and_in_the_docs(reason: FinishReason) -> None:
    writer = CompletionWriter(CompletionRequest(prompt="x"), Head("id", 0, "m"), [""])
    result = end_of(reason).result()
    word = json.loads(writer.whole([result]))["choices"][0]["finish_reason"]
    assert word == reason.name.lower()
    assert f"`{word}`" in (DOCS / "gateway.md").read_text()


def test_every_reason_is_in_the_docs_of_the_sdk() -> None:
    text = (DOCS / "sdk.md").read_text()
    assert [one.name for one in FinishReason if f"{one.name}`" not in text] == []
