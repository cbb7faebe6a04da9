"""The `openai` package against a gateway: python openai_client.py BASE_URL MODEL.

Prints a line for each thing that works and exits with 1 when one does not.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import openai
import pydantic

BASE_URL, MODEL = sys.argv[1:3]
CAPITAL = [{"role": "user", "content": "Complete the sentence: The capital of Japan is"}]
sync = openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0)


def make_async() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key="any", max_retries=0)


def models() -> None:
    assert MODEL in [model.id for model in sync.models.list()]
    assert sync.models.retrieve(MODEL).id == MODEL


def completion() -> None:
    answer = sync.completions.create(
        model=MODEL, prompt="The capital of Japan is", max_tokens=5, temperature=0
    )
    assert "Tokyo" in answer.choices[0].text, answer
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def completions_of_several_prompts() -> None:
    prompts = ["One, two,", "A, B,"]
    answer = sync.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def completion_streamed() -> None:
    whole = sync.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0)
    text, usage = "", None
    for event in sync.completions.create(
        model=MODEL,
        prompt="One, two,",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += event.choices[0].text if event.choices else ""
        usage = event.usage or usage
    assert text == whole.choices[0].text
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def chat() -> None:
    answer = sync.chat.completions.create(
        model=MODEL, messages=CAPITAL, max_completion_tokens=20, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert "Tokyo" in (answer.choices[0].message.content or ""), answer
    assert answer.choices[0].finish_reason == "stop"


def chat_of_parts_with_a_system_prompt() -> None:
    parts = [
        {"type": "text", "text": "Complete the sentence:"},
        {"type": "text", "text": "The capital of Japan is"},
    ]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = sync.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    assert "Tokyo" in (answer.choices[0].message.content or "")


def chat_streamed() -> None:
    text, roles = "", []
    with sync.chat.completions.stream(model=MODEL, messages=CAPITAL, max_tokens=20, temperature=0) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion()
    roles.append(final.choices[0].message.role)
    assert text == final.choices[0].message.content
    assert roles == ["assistant"]


def chat_logprobs() -> None:
    answer = sync.chat.completions.create(
        model=MODEL, messages=CAPITAL, max_tokens=3, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert len(content) == 3
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def completion_logprobs() -> None:
    answer = sync.completions.create(model=MODEL, prompt="One, two,", max_tokens=3, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == 3
    assert "".join(logprobs.tokens or []) == answer.choices[0].text


def n_and_seed() -> None:
    def ask() -> list[str]:
        answer = sync.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=8, n=3, seed=7, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def stop() -> None:
    answer = sync.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=30, temperature=0, stop=["five", ", six"]
    )
    assert answer.choices[0].finish_reason == "stop", answer
    assert "five" not in answer.choices[0].text


def logit_bias() -> None:
    plain = sync.completions.create(model=MODEL, prompt="One, two,", max_tokens=1, temperature=0, logprobs=1)
    extra = {"return_token_ids": True}
    token = sync.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=1, temperature=0, extra_body=extra
    )
    banned = token.choices[0].model_extra["token_ids"][0]  # type: ignore[index]
    other = sync.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=1, temperature=0, logit_bias={str(banned): -100}
    )
    assert other.choices[0].text != plain.choices[0].text


def refusal_of(ask: Callable[[], object]) -> openai.APIStatusError:
    try:
        ask()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it was not refused")


def errors() -> None:
    def complete(**body: Any) -> openai.APIStatusError:
        return refusal_of(lambda: sync.completions.create(**{"model": MODEL, "prompt": "x", **body}))

    unknown = complete(model="nope")
    assert isinstance(unknown, openai.NotFoundError)
    assert (unknown.param, unknown.code) == ("model", "model_not_found")
    for body in ({"suffix": "y"}, {"top_p": 2}, {"prompt": "x " * 100_000}):
        refused = complete(**body)
        assert isinstance(refused, openai.BadRequestError), refused
        assert refused.param == next(iter(body)), refused


def deadline_by_header() -> None:
    late = refusal_of(
        lambda: sync.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=1000,
            extra_body={"ignore_eos": True},
            extra_headers={"x-octavo-deadline-ms": "300"},
        )
    )
    assert late.status_code == 408, late


def timeout_of_the_client() -> None:
    try:
        sync.with_options(timeout=0.5).completions.create(
            model=MODEL, prompt="x", max_tokens=1000, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("no timeout")


def stream_closed_early() -> None:
    stream = sync.completions.create(
        model=MODEL, prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


async def async_many() -> None:
    async with make_async() as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=8, temperature=0)
                for _ in range(8)
            )
        )
    assert len({answer.choices[0].message.content for answer in answers}) == 1


async def async_stream() -> None:
    async with make_async() as client:
        stream = await client.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stream=True
        )
        text = "".join([event.choices[0].text async for event in stream])
    whole = sync.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0)
    assert text == whole.choices[0].text


async def async_cancelled() -> None:
    async with make_async() as client:
        task = asyncio.create_task(
            client.completions.create(
                model=MODEL, prompt="x", max_tokens=1000, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        started = time.monotonic()
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        # Nothing of the thousand tokens stands in its way.
        assert time.monotonic() - started < 30


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    kind: Literal["town", "village"]


ABOUT: list[Any] = [{"role": "user", "content": "Tokyo as JSON:"}]


def class_parsed() -> None:
    answer = sync.chat.completions.parse(model=MODEL, messages=ABOUT, response_format=City, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, City), answer


def class_parsed_streamed() -> None:
    with sync.chat.completions.stream(
        model=MODEL, messages=ABOUT, response_format=City, max_tokens=200
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, City), answer


def constraints_of_vllm() -> None:
    for wanted, pattern in (({"regex": "[a-f]{8}!"}, "[a-f]{8}!"), ({"choice": ["yes", "no"]}, "yes|no")):
        answer = sync.chat.completions.create(
            model=MODEL, messages=ABOUT, max_tokens=20, extra_body={"structured_outputs": wanted}
        )
        assert re.fullmatch(pattern, answer.choices[0].message.content or ""), answer


def impossible_constraint_is_a_bad_request() -> None:
    schema: Any = {"name": "n", "schema": {"$ref": "#/nowhere"}}
    refused: openai.BadRequestError | None = None
    try:
        sync.chat.completions.create(
            model=MODEL, messages=ABOUT, response_format={"type": "json_schema", "json_schema": schema}
        )
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.param == "response_format", refused


CHECKS: list[Callable[[], None] | Callable[[], Coroutine[Any, Any, None]]] = [
    models,
    completion,
    completions_of_several_prompts,
    completion_streamed,
    chat,
    chat_of_parts_with_a_system_prompt,
    chat_streamed,
    chat_logprobs,
    completion_logprobs,
    n_and_seed,
    stop,
    logit_bias,
    errors,
    deadline_by_header,
    timeout_of_the_client,
    stream_closed_early,
    async_many,
    async_stream,
    async_cancelled,
    class_parsed,
    class_parsed_streamed,
    constraints_of_vllm,
    impossible_constraint_is_a_bad_request,
]


def main() -> int:
    failed = 0
    print(f"openai {openai.__version__}")
    for check in CHECKS:
        try:
            outcome = check()
            if outcome is not None:
                asyncio.run(outcome)
            print(f"ok      {check.__name__}", flush=True)
        except Exception:  # noqa: BLE001 - told, and counted
            failed += 1
            print(f"FAILED  {check.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} work")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
