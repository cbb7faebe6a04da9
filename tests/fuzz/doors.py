"""The doors of a running service: RPCs of the scheduler on a real port, routes of the gateway in process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import grpc.aio
from octavo.aio import AsyncClient
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

from tests.e2e.scheduler_stack import one_worker, until
from tests.fuzz.mutations import harmed
from tests.fuzz.reader import Fault, Reader

_OURS: Final = frozenset(
    {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_ANSWER_S: Final = 8.0
_TOGETHER: Final = 20
"""Messages of an episode."""
_FULL: Final = pb.GenerateRequest(
    request_id="r",
    text="hello",
    sampling=common_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, seed=3, logit_bias={5: 1.5}, max_tokens=2, n=2, stop=["x"],
        stop_token_ids=[7], logprobs=1,
    ),
    terms=pb.ServiceTerms(priority=1, may_trim=True, keep_head_tokens=1, cache_salt="s"),
    resume=[pb.ResumedChoice(choice=0, token_ids=[40], shown_bytes=1)],
    return_token_ids=True,
    accepted_as=pb.AcceptedAs(prompt_tokens=5),
)  # fmt: skip
_CHAT: Final = pb.Chat(
    messages=[
        common_pb2.ChatMessage(role="user", content="hi"),
        common_pb2.ChatMessage(role="assistant", tool_calls_json='[{"id": "1"}]', tool_call_id="1"),
    ],
    tools_json="[]",
    template_vars_json='{"a": 1}',
)
_SAMPLING: Final = common_pb2.SamplingParams(max_tokens=2)
_CONSTRAINTS: Final = [
    common_pb2.StructuredOutput(json_schema='{"properties": {"a": {"enum": [1]}}}', strict=True),
    common_pb2.StructuredOutput(regex="[a-c]{2}"),
    common_pb2.StructuredOutput(choice=common_pb2.ChoiceList(values=["a", "b"])),
    common_pb2.StructuredOutput(structural_tag='{"format": {"type": "any_text"}}'),
]
SEEDS: Final[dict[str, list[Any]]] = {
    "Generation/Generate": [
        _FULL,
        *(
            pb.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(max_tokens=2, structured=one))
            for one in _CONSTRAINTS
        ),
        pb.GenerateRequest(chat=_CHAT, sampling=_SAMPLING),
        pb.GenerateRequest(tokens=pb.TokenIds(ids=range(3, 40)), sampling=_SAMPLING),
    ],
    "Generation/Session": [
        pb.SessionRequest(open=pb.OpenSession(paced=True)),
        pb.SessionRequest(generate=_FULL),
        pb.SessionRequest(generate_many=pb.GenerateRequests(requests=[_FULL, pb.GenerateRequest(text="b")])),
        pb.SessionRequest(cancel=pb.CancelRequest(request_id="r")),
    ],
    "Generation/Tokenize": [
        pb.TokenizeRequest(text="hello", return_pieces=True),
        pb.TokenizeRequest(chat=_CHAT),
    ],
    "Generation/Detokenize": [pb.DetokenizeRequest(token_ids=range(3, 90), keep_special_tokens=True)],
    "Generation/ListModels": [pb.ListModelsRequest()],
    "Operations/GetStatus": [operations_pb2.GetStatusRequest(history=True)],
    "Operations/WatchStatus": [operations_pb2.WatchStatusRequest(interval_ms=100)],
    "Operations/PinPrefix": [operations_pb2.PinPrefixRequest(name="p", chat=_CHAT, cache_salt="s")],
    "Operations/UnpinPrefix": [operations_pb2.UnpinPrefixRequest(model="echo", name="p")],
    "Operations/SetFaults": [
        operations_pb2.SetFaultsRequest(worker_id="w", faults=[operations_pb2.Fault(kind=1, count=1)])
    ],
    "Operations/GetUsage": [operations_pb2.GetUsageRequest(since_s=60)],
    "Operations/AuditWorkers": [operations_pb2.AuditWorkersRequest(worker_id="w1")],
}
"""All but Drain, which would do as it is told."""
_FUNCTION: Final = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
BODIES: Final[dict[str, list[Any]]] = {
    "/v1/completions": [
        {
            "prompt": "hello", "max_tokens": 2, "n": 2, "temperature": 0.5, "top_p": 0.5, "seed": 3,
            "logit_bias": {"5": 1.5}, "logprobs": 1, "stream": True, "user": "u", "cache_salt": "s",
            "stop": ["x"], "stream_options": {"include_usage": True},
        },
        {"prompt": [[3, 4], [5]], "max_tokens": 1, "echo": True},
    ],
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]},
            ],
            "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1, "tools": [],
            "tool_choice": "none", "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1},
        },
        {
            "messages": [], "max_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
            "structured_outputs": {"json": {}, "regex": "a", "choice": ["a"]},
        },
    ],
    "/v1/responses": [
        {
            "model": "echo", "instructions": "i", "max_output_tokens": 2, "stream": True,
            "metadata": {"a": "b"},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "o"},
            ],
            "tools": [_FUNCTION], "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        },
        {"input": "a", "max_output_tokens": 1, "tools": [_FUNCTION], "tool_choice": "required"},
    ],
    "/v1/messages": [
        {
            "model": "echo", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stream": True,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "h", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "o"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["x"],
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": "echo", "messages": [{"role": "user", "content": "a"}], "system": "s"},
    ],
    "/v1/embeddings": [
        {"model": "echo", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "u"},
        {"input": [[3, 4], [5]]},
    ],
    "/tokenize": [
        {"prompt": "a b", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "a"}]},
    ],
    "/detokenize": [{"tokens": [40, 41, 42]}],
}  # fmt: skip


class _Door(Reader):
    """A scheduler and a worker that repeats its prompt, both in this process."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    async def _open(self) -> None:
        self.stack, self.worker = await self._stack.enter_async_context(one_worker())

    def episode(self, rng: random.Random) -> None:
        self._runner.run(self._ask(rng))

    async def _ask(self, rng: random.Random) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self._runner.run(self._audit())

    async def _audit(self) -> None:
        """Nothing is live, no block is in use, and a neighbour gets what it asks for."""
        await until(lambda: self.stack.process.driver.snapshot().live_requests == 0)
        await until(self.worker.is_empty)
        await self.stack.status()
        output = await self.stack.generate(text="the neighbour")
        if output.text[0] != "the neighbour":
            raise Fault(f"the neighbour got {output.text}")


class SchedulerDoor(_Door):
    """One method, over the wire."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.name = f"rpc_{method.rpartition('/')[2].lower()}"
        self._path = f"/octavo.v1.{method}"
        self._session = method.endswith("/Session")
        self._seeds = [one.SerializeToString() for one in SEEDS[method]]

    async def _ask(self, rng: random.Random) -> None:
        messages = [harmed(rng, rng.choice(self._seeds), self._seeds, message=True) for _ in range(_TOGETHER)]
        self.read.extend(messages)
        if self._session:
            await self._call(messages)
        else:
            await asyncio.gather(*(self._call([message]) for message in messages))

    async def _call(self, messages: Sequence[bytes]) -> None:
        channel: Any = self.stack.channel
        call = channel.stream_stream(self._path)(_given(messages), timeout=_ANSWER_S)
        try:
            async for answer in call:
                if self._session:
                    self._check(pb.SessionEvent.FromString(answer))
                elif self._path.endswith("WatchStatus"):
                    call.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            # So says the library of a client that was answered before it had sent all.
            if error.code() in _OURS and error.details() != "Internal error from Core":
                raise Fault(f"{self._path} answered {error.code().name}: {error.details()}") from None

    @staticmethod
    def _check(message: pb.SessionEvent) -> None:
        for event in message.events:
            if event.error.reason == "INTERNAL" or event.finished.error.reason == "INTERNAL":
                raise Fault(f"{event}")


async def _given(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


class GatewayDoor(_Door):
    """Every route, called as the server would call it."""

    name = "http"

    async def _open(self) -> None:
        await super()._open()
        endpoint = f"127.0.0.1:{self.stack.port}"
        client = await self._stack.enter_async_context(AsyncClient(endpoint))
        self._app = create_app(GatewaySettings.load({"endpoint": endpoint}), client)
        self._seeds = {
            path: [json.dumps(body).encode() for body in bodies] for path, bodies in BODIES.items()
        }

    async def _ask(self, rng: random.Random) -> None:
        path = rng.choice(list(self._seeds))
        seeds = self._seeds[path]
        body = harmed(
            rng, rng.choice(seeds), [one for many in self._seeds.values() for one in many], message=False
        )
        self.read.append(body)
        status, answer = await self._call(path, body)
        if status >= 500:
            raise Fault(f"{path} answered {status}: {answer[:300]!r}")

    async def _call(self, path: str, body: bytes) -> tuple[int, bytes]:
        sent: list[Any] = []
        to_give = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return to_give.pop() if to_give else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("h", 1), "server": ("x", 1),
        }  # fmt: skip
        await self._app(scope, receive, send)
        status = next(one["status"] for one in sent if one["type"] == "http.response.start")
        return status, b"".join(one.get("body", b"") for one in sent)


def door_readers() -> list[Reader]:
    """Return one for each method, and one for the gateway."""
    return [GatewayDoor(), *map(SchedulerDoor, SEEDS)]
