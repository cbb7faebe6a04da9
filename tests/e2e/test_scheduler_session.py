"""Session streams over real ports: many requests, one stream, and nothing one does harms another."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.requests.outbox import SessionOutbox
from scheduler_svc.requests.tenants import RefusalPace
from tests.e2e.scheduler_stack import WAIT_S, Output, Stack, Worker, error_of, one_worker, until

Pair = tuple[Stack, Worker]


class Client:
    """One session stream, and what has come on it."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel | None = None) -> None:
        stub = generation_pb2_grpc.GenerationStub(channel or stack.channel)
        self.call: Any = stub.Session()  # type: ignore[call-arg] # written to instead
        self.outputs: dict[str, Output] = {}
        self.errors: dict[str, common_pb2.Error] = {}
        self.credits = 0
        self.messages: list[pb.SessionEvent] = []

    async def generate(self, request_id: str, **fields: Any) -> None:
        request = pb.GenerateRequest(request_id=request_id, **fields)
        await self.call.write(pb.SessionRequest(generate=request))

    async def cancel(self, request_id: str) -> None:
        await self.call.write(pb.SessionRequest(cancel=pb.CancelRequest(request_id=request_id)))

    async def open(self, *, paced: bool) -> None:
        await self.call.write(pb.SessionRequest(open=pb.OpenSession(paced=paced)))

    async def read(self) -> bool:
        """Take in the next message; return whether there was one."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        if not isinstance(message, pb.SessionEvent):
            return False
        self.messages.append(message)
        self.credits += message.credits
        for event in message.events:
            if event.WhichOneof("event") == "error":
                self.errors[event.request_id] = event.error
            else:
                self.outputs.setdefault(event.request_id, Output()).take(event)
        return True

    async def read_until_ended(self, *request_ids: str) -> None:
        while not all(self.has_ended(request_id) for request_id in request_ids):
            assert await self.read()

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.errors or bool(
            request_id in self.outputs and self.outputs[request_id].finished
        )


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with one_worker() as pair:
        yield pair


async def test_session_tokens_of_one_step_come_in_one_message(pair: Pair) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    names = [f"r{index}" for index in range(8)]
    for name in names:
        await client.generate(name, text=f"{name} says hello")
    await until(lambda: stack.process.driver.snapshot().live_requests == 8)
    worker.gate.open()
    await client.read_until_ended(*names)
    assert all(client.outputs[name].text[0] == f"{name} says hello" for name in names)
    # Once all of them decode, a message has a delta of each.
    assert max(len(message.events) for message in client.messages) >= 8
    assert len(client.messages) < 8 * len("r0 says hello")
    await client.call.done_writing()
    assert not await client.read()
    assert await client.call.code() == grpc.StatusCode.OK
    await until(worker.is_empty)


async def test_session_bad_request_harms_nobody_else(pair: Pair) -> None:
    stack, _ = pair
    client = Client(stack)
    await client.generate("good", text="fine")
    await client.generate("bad", text="", sampling={"temperature": -1})
    await client.generate("", text="nameless")
    await client.generate("unknown", text="a", model="gpt-9")
    await client.generate("good2", text="fine too")
    await client.read_until_ended("good", "bad", "", "unknown", "good2")
    assert client.outputs["good"].text[0] == "fine"
    assert client.outputs["good2"].text[0] == "fine too"
    assert {entry.field for entry in client.errors["bad"].violations} == {"text", "sampling.temperature"}
    assert client.errors[""].violations[0].field == "request_id"
    assert client.errors["unknown"].reason == "UNKNOWN_MODEL"
    assert (await stack.status()).outcomes == {"STOP": 2, "INVALID_REQUEST": 2, "UNKNOWN_MODEL": 1}


async def test_session_message_that_does_not_parse_fails_that_request_only(pair: Pair) -> None:
    stack, _ = pair
    channel: Any = stack.channel
    call = channel.stream_stream("/octavo.v1.Generation/Session")()
    good = pb.SessionRequest(generate=pb.GenerateRequest(request_id="good", text="fine"))
    bad = pb.SessionRequest(generate=pb.GenerateRequest(request_id="bad", text="@@"))
    await call.write(bad.SerializeToString().replace(b"@@", b"\xff\xfe"))
    await call.write(b"\xff\xff")
    await call.write(good.SerializeToString())
    await call.done_writing()
    events = [event async for data in call for event in pb.SessionEvent.FromString(data).events]
    errors = [event for event in events if event.WhichOneof("event") == "error"]
    assert [(event.request_id, event.error.reason) for event in errors] == [
        ("bad", "INVALID_REQUEST"),
        ("", "INVALID_REQUEST"),
    ]
    assert errors[0].error.violations[0].field == "text"
    assert "".join(event.delta.text for event in events if event.request_id == "good") == "fine"
    await stack.status()


async def test_session_requests_that_come_together_are_served_as_if_each_came_alone(pair: Pair) -> None:
    stack, _ = pair
    channel: Any = stack.channel
    call = channel.stream_stream("/octavo.v1.Generation/Session")()
    requests = [pb.GenerateRequest(request_id=f"r{index}", text=f"no {index}") for index in range(40)]
    requests[7].text = "@@"
    requests[8].model = "unknown"
    together = pb.SessionRequest(generate_many=pb.GenerateRequests(requests=requests))
    await call.write(together.SerializeToString().replace(b"@@", b"\xff\xfe"))
    await call.done_writing()
    text, errors = dict[str, str](), dict[str, str]()
    async for data in call:
        for event in pb.SessionEvent.FromString(data).events:
            text[event.request_id] = text.get(event.request_id, "") + event.delta.text
            if event.HasField("error"):
                errors[event.request_id] = event.error.reason
    assert errors == {"r7": "INVALID_REQUEST", "r8": "UNKNOWN_MODEL"}
    assert all(text[f"r{index}"] == f"no {index}" for index in range(40) if index not in {7, 8})
    await stack.status()


async def test_session_live_request_id_cannot_be_used_again(pair: Pair) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    await client.generate("same", text="first")
    await until(lambda: stack.process.driver.snapshot().live_requests == 1)
    await client.generate("same", text="second")
    while "same" not in client.errors:
        await client.read()
    assert client.errors.pop("same").reason == "DUPLICATE_REQUEST_ID"
    worker.gate.open()
    await client.read_until_ended("same")
    assert client.outputs.pop("same").text[0] == "first"
    await client.generate("same", text="third")
    await client.read_until_ended("same")
    assert client.outputs["same"].text[0] == "third"


async def test_session_cancel_ends_one_request(pair: Pair) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    await client.generate("a", text="to be cancelled")
    await client.generate("b", text="to go on")
    await until(lambda: stack.process.driver.snapshot().live_requests == 2)
    await client.cancel("a")
    await client.cancel("nobody")
    await client.read_until_ended("a")
    assert client.outputs["a"].finished[0].reason == common_pb2.FINISH_REASON_CANCELLED
    worker.gate.open()
    await client.read_until_ended("b")
    assert client.outputs["b"].text[0] == "to go on"
    await until(worker.is_empty)
    assert (await stack.status()).outcomes == {"STOP": 1, "CANCELLED": 1}


async def test_session_end_cancels_all_its_requests(pair: Pair) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    for index in range(20):
        await client.generate(f"r{index}", text="x" * 100)
    await until(lambda: stack.process.accounts.live == 20)
    client.call.cancel()
    await until(lambda: stack.process.accounts.live == 0)
    worker.gate.open()
    await until(worker.is_empty)
    assert (await stack.status()).outcomes == {"CANCELLED": 20}


async def test_paced_session_is_never_refused_for_queue_depth(pair: Pair) -> None:
    async with one_worker(max_waiting_requests=2) as (stack, worker):
        client = Client(stack)
        await client.open(paced=True)
        await client.read()
        assert client.credits == 32
        worker.gate.close()
        sent = 0
        while sent < 100:
            while client.credits:
                client.credits -= 1
                await client.generate(f"r{sent}", text=f"number {sent}")
                sent += 1
            worker.gate.open()
            await client.read()
        await client.read_until_ended(*(f"r{index}" for index in range(sent)))
        assert not client.errors
        assert client.outputs["r99"].text[0] == "number 99"


async def test_paced_session_beyond_its_credits_is_refused(pair: Pair) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    await client.open(paced=True)
    await client.read()
    for index in range(client.credits + 1):
        await client.generate(f"r{index}", text="x")
    last = f"r{client.credits}"
    await client.read_until_ended(last)
    assert client.errors[last].reason == "CREDITS_EXCEEDED"
    worker.gate.open()
    await client.read_until_ended("r0")


@pytest.mark.parametrize("malformed", [False, True])
async def test_paced_session_gets_back_the_credit_of_what_is_refused(pair: Pair, *, malformed: bool) -> None:
    """Else a client that keeps to its credits would fall silent after some faults."""
    stack, _ = pair
    nameless = pb.SessionRequest(generate=pb.GenerateRequest(text="@@")).SerializeToString()
    if malformed:
        nameless = nameless.replace(b"@@", b"\xff\xfe")
    call: Any = stack.channel.stream_stream(
        "/octavo.v1.Generation/Session", response_deserializer=pb.SessionEvent.FromString
    )()
    await call.write(pb.SessionRequest(open=pb.OpenSession(paced=True)).SerializeToString())
    credits_, errors = 0, 0
    async with asyncio.timeout(WAIT_S):
        for sent in range(100):
            while credits_ == 0:
                message = await call.read()
                credits_ += message.credits
                errors += len(message.events)
            credits_ -= 1
            await call.write(nameless)
            assert errors <= sent
        while credits_ < 32 or errors < 100:
            message = await call.read()
            credits_ += message.credits
            errors += len(message.events)
    call.cancel()


async def test_unpaced_session_is_refused_beyond_the_queue_bound() -> None:
    async with one_worker({"max_num_seqs": 1}, max_waiting_requests=2) as (stack, worker):
        client = Client(stack)
        worker.gate.close()
        await client.generate("running", text="x")
        await until(lambda: stack.process.driver.snapshot().workers[0].running == 1)
        for index in range(5):
            await client.generate(f"r{index}", text="x")
        while len(client.errors) < 3:
            await client.read()
        error = next(iter(client.errors.values()))
        assert (error.reason, error.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert error.retry_delay_ms > 0


async def test_session_that_floods_the_service_with_what_is_refused_is_read_from_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def note(_: RefusalPace, now: float, refusals: int = 1) -> float:
        del now
        refused.append(refusals)
        return 0.0

    monkeypatch.setattr(RefusalPace, "pause_s", note)
    stack, _ = pair
    client = Client(stack)
    many = pb.GenerateRequests(requests=[pb.GenerateRequest()] * 300)
    for _ in range(2):
        await client.call.write(pb.SessionRequest(generate_many=many))
    await client.generate("good", text="served when its turn comes")
    await client.read_until_ended("good")

    assert client.outputs["good"].text[0] == "served when its turn comes"
    assert refused == [300, 300, 0]


async def test_slow_consumer_is_cut_and_others_go_on() -> None:
    flags: dict[str, Any] = {"max_num_seqs": 64, "num_blocks": 4096}
    # Without this the client's own gRPC takes in megabytes that nobody reads.
    narrow = [("grpc.http2.bdp_probe", 0)]
    async with (
        one_worker(flags, max_backlog_bytes=100_000) as (stack, worker),
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.port}", options=narrow) as channel,
    ):
        slow, steady = Client(stack, channel), Client(stack)
        worker.gate.close()
        sampling = {"ignore_eos": True, "logprobs": 1}
        for index in range(32):
            text = f"{index}, a flood of tokens"
            await slow.generate(f"r{index}", text=text, sampling=sampling, return_token_ids=True)
        await until(lambda: stack.process.driver.snapshot().live_requests == 32)
        worker.gate.open()
        await until(lambda: stack.process.accounts.outcomes["SLOW_CONSUMER"] == 32)
        await steady.generate("s", text="steady")
        await steady.read_until_ended("s")
        assert steady.outputs["s"].text[0] == "steady"
        await until(worker.is_empty)
        # It has read nothing yet, and what waited for it is gone all the same.
        gc.collect()
        # By `type`: to ask some libraries' lazy objects for their class makes them warn.
        assert not any(type(one) is SessionOutbox and one.cut for one in gc.get_objects())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await slow.read_until_ended("nobody")
        assert error_of(caught.value).reason == "SLOW_CONSUMER"
