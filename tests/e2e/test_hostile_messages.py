"""Messages as large as they may be, and larger; callers that want all places. Over real ports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]  # the stubs lag
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.protocol.bounds import MAX_MESSAGE_BYTES
from octavo.sampling import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import operations_pb2

from tests.e2e.scheduler_stack import WAIT_S, error_of, one_worker
from tests.e2e.test_scheduler_access import bearer, key_file
from worker_svc.runner.sim import built_in_model

ROOM = MAX_MESSAGE_BYTES - 64
NOT_UTF8 = b"\x12\x02\xff\xfe"


def field(number: int, content: bytes) -> bytes:
    return _VarintBytes(number << 3 | 2) + _VarintBytes(len(content)) + content


def packed(number: int, id_bytes: bytes, size: int = ROOM) -> bytes:
    return field(number, id_bytes * (size // len(id_bytes)))


TURN = field(1, field(1, b"user") + field(2, b"x" * 1900))
WORST = {
    "empty turns": (field(5, b"\x0a\x00" * (ROOM // 2)), "chat.messages"),
    "turns and a name that is no text": (field(5, TURN * 8000) + NOT_UTF8, "model"),
    "stop strings": (field(6, b"\x6a\x00" * (ROOM // 2)), "sampling.stop"),
    "stop tokens one by one": (field(6, b"\x70\x05" * (ROOM // 2)), "sampling.stop_token_ids"),
    "stop tokens together": (field(6, packed(14, b"\x05", ROOM - 8)), "sampling.stop_token_ids"),
    "biases": (field(6, b"\x4a\x00" * (ROOM // 2)), "sampling.logit_bias"),
    "alternatives": (
        field(6, field(17, field(4, b"\x0a\x00" * (ROOM // 2 - 9)))),
        "sampling.structured.choice",
    ),
    "tokens": (field(4, packed(1, b"\x05", ROOM - 8)), "tokens.ids"),
    "resumed choices": (b"\x42\x00" * (ROOM // 2), "resume"),
    "a name": (field(2, b"m" * ROOM), "model"),
    "fields that nobody knows": (b"\x78\x05" * (ROOM // 2), None),
}


@pytest.mark.parametrize("name", WORST)
async def test_message_that_holds_too_much_is_refused_by_the_name_of_the_field(name: str) -> None:
    body, wrong = WORST[name]
    async with one_worker() as (stack, _):
        generate = stack.channel.unary_stream("/octavo.v1.Generation/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(body, timeout=WAIT_S).read()
        error = error_of(caught.value)
        assert error.reason == "INVALID_REQUEST"
        assert [violation.field for violation in error.violations] == ([wrong] if wrong else [])
        assert sum(stack.process.accounts.outcomes.values()) == 1
        assert (await stack.generate(text="hello")).finished


async def test_largest_text_is_too_long_for_the_model() -> None:
    async with one_worker() as (stack, _):
        generate = stack.channel.unary_stream("/octavo.v1.Generation/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(field(3, "é".encode() * (ROOM // 2)), timeout=WAIT_S).read()
        assert error_of(caught.value).reason == "PROMPT_TOO_LONG"


async def test_session_goes_on_after_messages_that_hold_too_much() -> None:
    async with one_worker() as (stack, _):
        session = stack.channel.stream_stream(
            "/octavo.v1.Generation/Session", response_deserializer=pb.SessionEvent.FromString
        )(timeout=WAIT_S)
        await session.write(field(4, b"\x0a\x00" * (ROOM // 2)))
        refused = (await session.read()).events[0]
        assert (refused.error.reason, refused.error.violations[0].field) == (
            "INVALID_REQUEST",
            "generate_many.requests",
        )
        fine = pb.GenerateRequest(request_id="good", text="hello").SerializeToString()
        too_much = field(1, b"bad") + field(6, b"\x6a\x01s" * 17)
        await session.write(field(4, field(1, too_much) + field(1, fine)))
        ended: dict[str, Any] = {}
        while len(ended) < 2:
            for event in (await session.read()).events:
                if event.WhichOneof("event") in ("error", "finished"):
                    ended[event.request_id] = event
        assert ended["bad"].error.violations[0].field == "sampling.stop"
        assert ended["good"].HasField("finished")
        session.cancel()


async def test_largest_sampling_of_many_choices_is_carried_and_the_link_lives() -> None:
    model = replace(built_in_model(), model_id="echo", vocab_size=4096)
    flags = {"max_num_seqs": 128, "num_blocks": 1024, "info": model}
    async with one_worker(flags) as (stack, worker):
        (link,) = stack.process.fleet
        ended: list[str] = []
        link._conclude = lambda _: ended.append("ended")  # type: ignore[method-assign]
        vocab = model.vocab_size
        output = await stack.generate(
            text="x",
            sampling={
                "n": 128,
                "max_tokens": 2,
                "logit_bias": dict.fromkeys(range(vocab - MAX_LOGIT_BIASES, vocab), 1.0),
                "stop_token_ids": range(vocab - MAX_STOP_TOKEN_IDS, vocab),
            },
        )
        assert len(output.finished) == 128
        assert (link.status.state, ended) == ("ready", [])
        assert await worker.loop.call(lambda engine: engine.num_live) == 0


async def test_strangers_watches_keep_neither_operators_nor_requests_nor_other_probes_out(
    tmp_path: Path,
) -> None:
    keys = key_file(tmp_path / "keys.toml", "user", "boss")
    async with one_worker(key_file=keys) as (stack, _):
        watch = health_pb2_grpc.HealthStub(stack.channel).Watch
        watches: list[Any] = []
        # More than there are places; all of one host.
        for _ in range(513):
            watches.append(watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
        answers = await asyncio.gather(*(one.read() for one in watches), return_exceptions=True)
        refusals = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error_of(refusal).reason for refusal in refusals} == {"TOO_MANY_CALLS"}
        assert len(watches) - len(refusals) == 128

        status = await stack.operations.GetStatus(
            operations_pb2.GetStatusRequest(), metadata=bearer("boss"), timeout=WAIT_S
        )
        assert status.status.arrivals == 0
        request = pb.GenerateRequest(text="hello")
        async for event in stack.generation.Generate(request, metadata=bearer("user"), timeout=WAIT_S):
            last = event
        assert last.HasField("finished")
        for one in watches:
            one.cancel()
