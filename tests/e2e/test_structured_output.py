"""Constrained output through the running system, on every runner: it follows its constraint whatever dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import httpx
import pytest
from octavo.aio import AsyncClient
from octavo.protocol.steps import FinishReason
from octavo.sampling import StructuredOutput
from octavo.stack import Stack, StackConfig
from octavo.types import GenerateResult
from pydantic import BaseModel, Field

from tests.e2e.conftest import CALM

WAIT_S: Final = 600.0
MAX_TOKENS: Final = 300
LONG_BLOCKS: Final = 8
"""What a worker holds that is in the middle of answers."""
_ROOM: Final = ("--num-blocks", "24", "--block-size", "16", "--max-num-seqs", "8", "--max-model-len", "384")
"""Not all outputs fit into it."""
_VLLM_ROOM: Final = ("--num-blocks", "12", "--block-size", "32", *_ROOM[4:])
"""vLLM takes no smaller blocks on a CPU."""
KINDS: Final = [
    pytest.param(("sim", "--runner", "sim", *_ROOM), id="sim"),
    pytest.param(
        ("demo", "--dtype", "float32", "--device", "cpu", *_ROOM),
        id="torch",
        marks=[pytest.mark.slow, pytest.mark.model],
    ),
    pytest.param(
        ("demo", "--runner", "vllm", "--dtype", "float32", "--enforce-eager", *_VLLM_ROOM),
        id="vllm",
        marks=[pytest.mark.slow, pytest.mark.model, pytest.mark.vllm],
    ),
]


class Leg(BaseModel):
    station: str = Field(max_length=8)
    kind: Literal["train", "büs", "船"]
    minutes: int = Field(ge=1, le=999)


class Trip(BaseModel):
    legs: list[Leg] = Field(min_length=3, max_length=3)
    price: int | None = Field(ge=0, le=999)


TRIP: Final = StructuredOutput(json_schema=json.dumps(Trip.model_json_schema()), compact=True)
WORDS: Final = StructuredOutput(regex=r"([a-z]{4} ){50}end")
SUMS: Final = StructuredOutput(regex=r"([0-9]{1,3}[+-][0-9]{1,3};\n){30}")
FOLLOWS: Final[Mapping[StructuredOutput, Callable[[str], object]]] = {
    TRIP: Trip.model_validate_json,
    WORDS: re.compile(r"([a-z]{4} ){50}end").fullmatch,
    SUMS: re.compile(r"([0-9]{1,3}[+-][0-9]{1,3};\n){30}").fullmatch,
}
SAMPLINGS: Final[Sequence[dict[str, Any]]] = (
    {"temperature": 0.0, "seed": 3},
    {"temperature": 1.0, "seed": 11},
)
CASES: Final = list(itertools.product(FOLLOWS, SAMPLINGS))


@pytest.fixture(scope="module", params=KINDS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model, *worker_args = request.param
    config = StackConfig(
        model=model,
        num_workers=2,
        standby=True,
        gateway_port=0,
        worker_args=worker_args,
        scheduler_args=CALM,
        folder=tmp_path_factory.mktemp("structured"),
    )
    with Stack(config) as started:
        started.wait_ready(WAIT_S)
        yield started


async def answers(client: AsyncClient) -> list[GenerateResult]:
    return await asyncio.gather(
        *(
            client.generate(f"{number}: a list", structured=structured, max_tokens=MAX_TOKENS, **sampling)
            for number, (structured, sampling) in enumerate(CASES)
        )
    )


async def midway(client: AsyncClient) -> None:
    """Return when both workers are in the middle of answers."""
    async with asyncio.timeout(WAIT_S):
        async for status in client.watch_status(0.1):
            busy = [worker.pool.active > LONG_BLOCKS for worker in status.workers]
            if len(busy) == 2 and all(busy):
                return


async def test_output_is_what_it_would_have_been_whatever_dies(stack: Stack) -> None:
    async with AsyncClient(stack.endpoints) as client:
        undisturbed = await answers(client)
        for (structured, _), answer in zip(CASES, undisturbed, strict=True):
            assert answer.finish_reason is FinishReason.STOP
            assert FOLLOWS[structured](answer.text)
        assert sum(answer.timings.preemptions for answer in undisturbed)

        for victim in (stack.workers[0], stack.scheduler):
            running = asyncio.ensure_future(answers(client))
            await midway(client)
            victim.kill()
            victim.start()
            assert not running.done()
            assert [one.token_ids for one in await running] == [one.token_ids for one in undisturbed]
            await asyncio.to_thread(stack.wait_ready, WAIT_S)


async def test_class_comes_back_as_its_instance(stack: Stack) -> None:
    async with AsyncClient(stack.endpoint) as client:
        options = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 5}
        result = await client.chat("Describe a leg.", response_format=Leg, **options)
        assert isinstance(result.parsed, Leg)
        cut = await client.chat("Describe a leg.", response_format=Leg, **options | {"max_tokens": 3})
        assert cut.parsed is None


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "leg", "strict": True, "schema": Leg.model_json_schema()},
                }
            },
            r'(?s)\{\s*"station"\s*:.*"minutes"\s*:\s*\d{1,3}\s*\}',
        ),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
        ({"structured_outputs": {"regex": "[a-f]{8}!"}}, "[a-f]{8}!"),
        ({"structured_outputs": {"grammar": 'root ::= "ab"{3} | "c"'}}, "ababab|c"),
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
    ],
)
async def test_gateway_answers_within_the_constraint_streamed_or_not(
    stack: Stack, wanted: dict[str, Any], pattern: str
) -> None:
    assert stack.gateway is not None
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": MAX_TOKENS,
        "seed": 6,
        "temperature": 0.5,
        **wanted,
    }
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.address}", timeout=WAIT_S) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        events = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text.split("\n\n")
    text = answer["message"]["content"]
    assert re.fullmatch(pattern, text)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text


async def test_hostile_constraint_is_its_request_s_error_at_the_gateway(stack: Stack) -> None:
    assert stack.gateway is not None
    body = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 8}
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.address}", timeout=WAIT_S) as http:
        for wanted in ({"regex": "("}, {"grammar": "root ::= nothing"}, {"json": {"$ref": "#/nowhere"}}):
            answer = await http.post("/v1/chat/completions", json={**body, "structured_outputs": wanted})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")
