"""Targets against real servers: a gRPC one that makes up tokens, an HTTP one that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from aiohttp import web
from octavo.errors import UnavailableError
from octavo_lab.command import BenchError
from octavo_lab.load.arrivals import Closed
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.records import Answer, Outcome
from octavo_lab.load.target import PlannedRequest
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget, StreamReader

from tests.unit.client.fake_scheduler import FakeOperations, FakeScheduler


class Counter:
    def __init__(self) -> None:
        self.chunks = 0
        self.began = asyncio.Event()

    def chunk(self) -> None:
        self.chunks += 1
        self.began.set()


def request(prompt: Any = "Hello", **fields: Any) -> PlannedRequest:
    return PlannedRequest(prompt=prompt, **{"prompt_tokens": 1, "output_tokens": 5, **fields})


# -- Octavo


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


async def test_octavo_answers_with_the_services_own_counts(scheduler: FakeScheduler) -> None:
    sink = Counter()
    async with OctavoTarget(scheduler.endpoint, model="fake") as target:
        answer = await target.ask(request(options={"priority": "interactive"}), sink)
        assert target.record.kind == "octavo"
        assert target.record.model == "fake"
        assert target.record.details["max_num_seqs"] == 32
    assert answer.outcome is Outcome.OK
    assert answer.output_tokens == 5
    assert answer.prompt_tokens == 3
    assert answer.queue_s is not None
    assert 1 <= sink.chunks <= 5
    sent = scheduler.requests[0]
    assert (sent.sampling.max_tokens, sent.sampling.ignore_eos, sent.sampling.temperature) == (5, True, 0.0)
    assert sent.terms.priority == 1


@pytest.mark.parametrize(
    ("prompt", "outcome", "reason"),
    [
        ("refuse QUEUE_FULL 8", Outcome.REFUSED, "QUEUE_FULL"),
        ("refuse QUEUE_TIMEOUT 4", Outcome.TIMEOUT, "QUEUE_TIMEOUT"),
        ("refuse PROMPT_TOO_LONG 3", Outcome.ERROR, "PROMPT_TOO_LONG"),
        ("fail STEP_FAILED 13", Outcome.ERROR, "STEP_FAILED"),
        ("fail OOM 13", Outcome.OOM, "OOM"),
    ],
)
async def test_octavo_errors_are_outcomes(
    scheduler: FakeScheduler, prompt: str, outcome: Outcome, reason: str
) -> None:
    async with OctavoTarget(scheduler.endpoint, model="fake") as target:
        answer = await target.ask(request(prompt), Counter())
    assert (answer.outcome, answer.reason) == (outcome, reason)


async def test_octavo_drives_an_adapter_by_its_name(scheduler: FakeScheduler) -> None:
    scheduler.adapters = ["french"]
    async with OctavoTarget(scheduler.endpoint, model="french") as target:
        await target.ask(request(), Counter())
        assert target.record.model == "french"
        assert target.record.details["max_model_len"] == 2048
    assert scheduler.requests[0].model == "french"
    async with OctavoTarget(scheduler.endpoint) as target:
        assert target.record.model == "fake"


async def test_octavo_tokens_and_conversations_are_sent_as_they_are(scheduler: FakeScheduler) -> None:
    async with OctavoTarget(scheduler.endpoint, model="fake", connections=2) as target:
        await target.ask(request([4, 5, 6]), Counter())
        await target.ask(request([{"role": "user", "content": "Hi"}]), Counter())
    assert list(scheduler.requests[0].tokens.ids) == [4, 5, 6]
    assert scheduler.requests[1].chat.messages[0].content == "Hi"
    assert scheduler.sessions == 2


async def test_octavo_a_key_that_may_only_generate_is_enough_and_stays_secret(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(self: Any, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "for operators")

    monkeypatch.setattr(FakeOperations, "GetStatus", denied)
    options = {"api_key": "secret-1"}
    async with OctavoTarget(scheduler.endpoint, api_key="secret-2", options=options) as target:
        answer = await target.ask(request(), Counter())
    assert answer.outcome is Outcome.OK
    assert target.record.details["max_model_len"] == 2048
    assert "secret" not in repr(target.record)


async def test_octavo_cancel_reaches_the_service(scheduler: FakeScheduler) -> None:
    await scheduler.hold(1)
    async with OctavoTarget(scheduler.endpoint, model="fake") as target:
        task = asyncio.create_task(target.ask(request(), Counter()))
        await scheduler.until(lambda: scheduler.most_live == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await scheduler.until(lambda: bool(scheduler.cancelled))


async def test_octavo_unknown_model_and_no_service_are_said_before_the_run(scheduler: FakeScheduler) -> None:
    with pytest.raises(BenchError, match="fake"):
        async with OctavoTarget(scheduler.endpoint, model="other"):
            pass
    await scheduler.stop()
    with pytest.raises(UnavailableError):
        async with OctavoTarget(scheduler.endpoint, connect_timeout_s=0.2):
            pass


# -- OpenAI


class Server:
    """Streams the events it is given; keeps the bodies and headers that it gets."""

    def __init__(self) -> None:
        self.events: Sequence[bytes] = ()
        self.status = 200
        self.text = ""
        self.models: Any = {"data": [{"id": "m", "max_model_len": 512}]}
        self.pieces: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.gone = asyncio.Event()
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/{path:.*}", self._stream)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.json_response({"token_strs": self.pieces} if self.pieces else {})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        if self.status != 200:
            return web.Response(status=self.status, text=self.text)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in self.events:
                if event == b"HANG":
                    await asyncio.Event().wait()
                if event == b"CUT":
                    assert request.transport is not None
                    request.transport.abort()
                    break
                await response.write(event)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    runner = await one.start()
    yield one
    await runner.cleanup()


def completion(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
DONE = b"data: [DONE]\n\n"


async def ask(server: Server, one: PlannedRequest, **config: Any) -> tuple[Answer, Counter]:
    sink = Counter()
    async with OpenAiTarget(OpenAiConfig(base_url=server.url, **config)) as target:
        return await target.ask(one, sink), sink


async def test_openai_counts_come_from_the_usage(server: Server) -> None:
    server.events = [sse(completion("a"), completion("")), sse(completion("c", "length")), sse(USAGE), DONE]
    answer, sink = await ask(server, request(), api_key="key", options={"top_k": 5})
    assert answer == Answer(prompt_tokens=9, output_tokens=3, cached_tokens=4)
    assert sink.chunks == 3
    body = server.bodies[0]
    assert body["prompt"] == "Hello"
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["top_k"]) == ("m", 5, True, 5)
    assert body["stream_options"] == {"include_usage": True}
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert server.paths == ["/v1/completions"]


async def test_openai_chat_does_not_take_the_role_for_a_token(server: Server) -> None:
    server.events = [
        sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        sse(
            {"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        ),
        sse(USAGE),
        DONE,
    ]
    answer, sink = await ask(server, request(), api="chat", ignore_eos=False)
    assert (answer.output_tokens, sink.chunks) == (3, 1)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert "ignore_eos" not in server.bodies[0]
    assert server.paths == ["/v1/chat/completions"]


async def test_openai_without_usage_counts_what_came(server: Server) -> None:
    server.events = [sse(completion("a"), completion("b")), DONE]
    async with OpenAiTarget(OpenAiConfig(base_url=f"{server.url}/v1/")) as target:
        run = await generate(target, Traffic(requests=[request()], arrivals=Closed(1)))
    assert run.requests[0].output_tokens == 2
    assert run.requests[0].prompt_tokens is None


async def test_openai_terms_of_service_become_headers(server: Server) -> None:
    server.events = [DONE]
    options = {"priority": "batch", "deadline": 1.5, "may_trim": True, "may_shed": True, "top_p": 0.5}
    await ask(server, request(options=options))
    headers = server.headers[0]
    assert headers["x-octavo-priority"] == "batch"
    assert headers["x-octavo-deadline-ms"] == "1500"
    assert headers["x-octavo-degrade"] == "may_trim,may_shed"
    assert server.bodies[0]["top_p"] == 0.5
    assert not {"priority", "deadline", "may_trim"} & server.bodies[0].keys()


@pytest.mark.parametrize(
    ("status", "text", "outcome", "reason"),
    [
        (429, '{"error": {"code": "queue_full", "type": "rate_limit_error"}}', Outcome.REFUSED, "queue_full"),
        (503, "busy", Outcome.REFUSED, "HTTP_503"),
        (503, '{"error": {"code": "no_worker"}}', Outcome.ERROR, "no_worker"),
        (408, '{"error": {"code": "queue_timeout"}}', Outcome.TIMEOUT, "queue_timeout"),
        (
            400,
            '{"object": "error", "type": "BadRequestError", "code": 400}',
            Outcome.ERROR,
            "BadRequestError",
        ),
        (500, '{"error": {"message": "CUDA out of memory", "type": "x"}}', Outcome.OOM, "x"),
        (500, '{"error": "odd"}', Outcome.ERROR, "odd"),
        (500, "[1]", Outcome.ERROR, "HTTP_500"),
    ],
)
async def test_openai_refusals_are_outcomes(
    server: Server, status: int, text: str, outcome: Outcome, reason: str
) -> None:
    server.status, server.text = status, text
    answer, _ = await ask(server, request())
    assert (answer.outcome, answer.reason, answer.output_tokens) == (outcome, reason, 0)


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        (
            sse({"error": {"type": "timeout_error", "code": "deadline_running"}}),
            Outcome.TIMEOUT,
            "deadline_running",
        ),
        (sse({"error": {"message": "boom", "code": 500}}), Outcome.ERROR, "STREAM_ERROR"),
        (b"data: {broken\n\n", Outcome.ERROR, "BAD_EVENT"),
        (b"data: [1]\n\n", Outcome.ERROR, "BAD_EVENT"),
        (b"", Outcome.ERROR, "STREAM_CUT"),
        (b"CUT", Outcome.ERROR, "ClientPayloadError"),
    ],
)
async def test_openai_streams_that_do_not_end_well_keep_their_output(
    server: Server, end: bytes, outcome: Outcome, reason: str
) -> None:
    server.events = [sse(completion("a"), completion("b")), end]
    answer, sink = await ask(server, request())
    assert (answer.outcome, answer.reason) == (outcome, reason)
    assert answer.output_tokens == sink.chunks == 2


async def test_openai_cancel_closes_the_connection(server: Server) -> None:
    server.events = [sse(completion("a")), b"HANG"]
    async with OpenAiTarget(OpenAiConfig(base_url=server.url)) as target:
        sink = Counter()
        task = asyncio.create_task(target.ask(request(), sink))
        async with asyncio.timeout(10):
            await sink.began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.gone.wait()


async def test_openai_wrong_kinds_of_prompt_are_said(server: Server) -> None:
    with pytest.raises(BenchError, match="token ids"):
        await ask(server, request([1, 2]), api="chat")
    with pytest.raises(BenchError, match="conversations"):
        await ask(server, request([{"role": "user", "content": "Hi"}]))


async def test_openai_pieces_are_text_however_a_vocabulary_writes_them(server: Server) -> None:
    server.pieces = ["Once", "\u0120upon", "\u010a", "\u2581a", " time"]
    async with OpenAiTarget(OpenAiConfig(base_url=server.url)) as target:
        assert await target.pieces("Once upon\n a time") == ["Once", " upon", "\n", " a", " time"]
        server.pieces = []
        with pytest.raises(BenchError, match="--tokenizer"):
            await target.pieces("Once")
    assert (server.bodies[0]["model"], server.bodies[0]["add_special_tokens"]) == ("m", False)


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"id": "a"}, {"id": "b"}]}, [], {"data": [1]}])
async def test_openai_asks_for_the_model_when_the_server_does_not_say(server: Server, models: Any) -> None:
    server.models = models
    with pytest.raises(BenchError):
        async with OpenAiTarget(OpenAiConfig(base_url=server.url)):
            pass


async def test_openai_no_server_is_said_before_the_run() -> None:
    with pytest.raises(BenchError, match="no OpenAI-compatible server"):
        async with OpenAiTarget(OpenAiConfig(base_url="http://127.0.0.1:1")):
            pass


@pytest.mark.parametrize("size", [1, 2, 7, 64, 4096])
def test_a_stream_may_be_split_anywhere(size: int) -> None:
    comment = b": ping\r\n\r\nevent: x\n"
    text = (
        comment
        + sse(completion("é\n\n"), completion("data: x")).replace(b"\n\n", b"\r\n\r\n")
        + sse(USAGE)
        + DONE
    )
    sink = Counter()
    reader = StreamReader(sink, chat=False)
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    assert reader.answer() == Answer(prompt_tokens=9, output_tokens=3, cached_tokens=4)
    assert sink.chunks == 2
