"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc.aio

from octavo._sdk import answers, requests
from octavo._sdk.batch import Batch
from octavo._sdk.call import Call
from octavo._sdk.channel import Endpoints, from_rpc, parse_api_key, parse_endpoints, parse_tls
from octavo._sdk.core import Core
from octavo._sdk.session import Patience, Transport
from octavo.errors import OctavoError
from octavo.protocol.steps import TokenLogprobs
from octavo.service.tls import Tls
from octavo.status import Status, UsageReport
from octavo.types import (
    Accepted,
    BatchItem,
    ChatOptions,
    Delta,
    DrainResult,
    EmbeddingResult,
    GenerateOptions,
    GenerateResult,
    Messages,
    ModelInfo,
    PinResult,
    Progress,
    Prompt,
    TemplateOptions,
    Tokenization,
    WorkerAudit,
)
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import operations_pb2

# grpc.health.v1: an empty request asks for the server as a whole, the answer's first field is its state.


class _Signal:
    """Wakes the tasks that wait. The call holds this and not the stream, which may be dropped."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class AsyncStream:
    """Output of one request, as it comes: iterate over it, once.

    The request runs from the moment the stream is made. It is cancelled, on the server too, when the
    task that iterates is cancelled, when `aclose()` is called, on leaving `async with`, and when the
    stream is dropped before its end. Deltas that were not fetched yet are merged.
    """

    def __init__(self, transport: Transport, request: pb.GenerateRequest) -> None:
        self._transport = transport
        self._signal = _Signal()
        self._call = Call(request, self._signal.fire, live=True)
        transport.submit(self._call)

    @property
    def request_id(self) -> str:
        """Names the request in the logs of the service."""
        return self._call.request_id

    @property
    def accepted(self) -> Accepted | None:
        """What the service said when it took the request; None before."""
        return self._call.accepted

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """As far as they have come; whole before the first output."""
        return tuple(self._call.prompt_logprobs)

    @property
    def no_worker_for(self) -> float:
        """Seconds for which the service has had no worker for it, as last told; 0 when output comes."""
        return self._call.no_worker_s

    @property
    def result(self) -> GenerateResult:
        """The outcome, once the stream has ended. Raises the error that ended it."""
        if not self._call.done:
            raise RuntimeError("the stream has not ended yet")
        return self._call.result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        call = self._call
        while (delta := call.take()) is None:
            if call.done:
                if call.error is not None:
                    raise call.error
                raise StopAsyncIteration
            await self._change()
        return delta

    async def progress(self) -> Progress | None:
        """Return all that came since the last time, of all choices at once; None after the end.

        One call for each step of the request, where iterating takes one for each choice of each step.
        Use one or the other.

        Raises:
            OctavoError: the request was refused or failed; what came before was returned first.
        """
        call = self._call
        while True:
            progress = call.take_progress()
            if progress.deltas or (progress.ended and call.error is None):
                return progress
            if call.done:
                if call.error is not None:
                    raise call.error
                return None
            await self._change()

    async def wait_accepted(self) -> Accepted | None:
        """Wait until the service has taken the request, or until it has ended without that."""
        while self._call.accepted is None and not self._call.done:
            await self._change()
        return self._call.accepted

    async def _change(self) -> None:
        try:
            await self._signal.wait()
        except asyncio.CancelledError:
            self._transport.cancel(self._call)
            raise

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        self._transport.cancel(self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and not call.done:
            self._transport.post(self._transport.cancel, call)


class AsyncClient:
    """Speaks to one Octavo service, on the event loop that uses it first.

    Args:
        endpoint: `host:port` of the scheduler; several (a list, or separated by commas) are tried in
            order and stand in for each other. Absent: the variable OCTAVO_ENDPOINT, or 127.0.0.1:50051.
        api_key: goes with every call. Absent: the variable OCTAVO_API_KEY, or none. Requests may bring
            keys of their own (option `api_key`), as those of a gateway do.
        tls: files for TLS. It is spoken to endpoints that begin with `grpcs://` and, where this is given, to
            all that do not begin with `grpc://`. Absent: the variables OCTAVO_TLS_CA, _CERT, _KEY, or none.
        connect_timeout: seconds to try until a first connection stands.
        reconnect_timeout: seconds to try to get a lost connection back before the running requests fail.
            Until then they wait, and go on where they were.

    Raises:
        InvalidRequestError: an endpoint or the key is malformed, or a file of `tls` cannot be read.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        connect_timeout: float = 10.0,
        reconnect_timeout: float = 30.0,
    ) -> None:
        endpoints = Endpoints(parse_endpoints(endpoint), parse_api_key(api_key), parse_tls(tls))
        self._core = Core(endpoints, Patience(connect_timeout, reconnect_timeout))

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Return the whole output for a prompt.

        Raises:
            OctavoError: the request was refused or failed; see `octavo.errors`.
        """
        return requests.parsed(await self._core.run(requests.text_request(prompt, options)), options)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a request and return its output as it comes; raises as `generate` does."""
        return self._start(requests.text_request(prompt, options))

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateResult:
        """Return the whole answer in a conversation; raises as `generate` does."""
        return requests.parsed(await self._core.run(requests.chat_request(messages, options)), options)

    def chat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncStream:
        """Start the answer in a conversation and return it as it comes; raises as `generate` does."""
        return self._start(requests.chat_request(messages, options))

    async def embed(
        self, inputs: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> EmbeddingResult:
        """Return the vectors of a text, of token ids, or of a list of either.

        The option `pooling` says how they are made; what says how to sample is ignored.

        Raises:
            OctavoError: one of them was refused or failed; see `octavo.errors`.
        """
        results = await self._core.run_all(requests.embed_requests(inputs, options))
        return EmbeddingResult(
            tuple(result.embedding for result in results),
            sum(result.usage.prompt_tokens for result in results),
        )

    async def batch(
        self, prompts: Iterable[Prompt | BatchItem], **options: Unpack[GenerateOptions]
    ) -> list[GenerateResult | OctavoError]:
        """Return the outcome of each prompt, in order; one that fails has its error there."""
        ends = {index: end async for index, end in self.batch_iter(prompts, **options)}
        return [ends[index] for index in range(len(ends))]

    async def batch_iter(
        self, prompts: Iterable[Prompt | BatchItem], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[tuple[int, GenerateResult | OctavoError]]:
        """Yield (index of the prompt, outcome) as they come.

        The service sets the pace: a prompt is sent when there is credit for it, and none is refused for
        queue depth. The class is `batch` unless the options say otherwise. The iterable runs on the event
        loop, and is asked for the next prompt only while no outcome waits to be yielded.
        """
        ended: asyncio.Queue[int] = asyncio.Queue()
        batch = Batch(self._core, prompts, options, ended.put_nowait)
        transport = self._core.transport(paced=True)
        try:
            while True:
                while ended.empty() and batch.may_pull():
                    if (call := batch.pull()) is not None:
                        transport.submit(call)
                    await asyncio.sleep(0)  # Outcomes come between prompts, and others have their turn.
                if not batch.under_way:
                    return
                yield batch.take(await ended.get())
        finally:
            for call in batch.calls:
                transport.cancel(call)

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        pieces: bool = False,
        api_key: str | None = None,
    ) -> Tokenization:
        """Return the token ids of a text. `api_key`, here and below: as in `GenerateOptions`."""
        request = pb.TokenizeRequest(model=model, return_pieces=pieces, add_special_tokens=add_special_tokens)
        with requests.naming("text"):
            request.text = text
        return await self._tokenize(request, api_key)

    async def tokenize_chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        pieces: bool = False,
        api_key: str | None = None,
        **options: Unpack[TemplateOptions],
    ) -> Tokenization:
        """Return the token ids of a conversation, rendered with the model's template."""
        chat = requests.chat(messages, options)
        request = pb.TokenizeRequest(model=model, chat=chat, return_pieces=pieces)
        return await self._tokenize(request, api_key)

    async def _tokenize(self, request: pb.TokenizeRequest, api_key: str | None) -> Tokenization:
        answer = await self._core.unary(
            lambda on: on.generation.Tokenize(request, metadata=on.metadata_of(api_key))
        )
        return Tokenization(tuple(answer.token_ids), tuple(answer.pieces), answer.max_model_len)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        api_key: str | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = pb.DetokenizeRequest(model=model, keep_special_tokens=keep_special_tokens)
        with requests.naming("token_ids"):
            request.token_ids.extend(token_ids)
        answer = await self._core.unary(
            lambda on: on.generation.Detokenize(request, metadata=on.metadata_of(api_key))
        )
        return answer.text

    async def models(self, *, api_key: str | None = None) -> list[ModelInfo]:
        """Return the models that are served."""
        request = pb.ListModelsRequest()
        answer = await self._core.unary(
            lambda on: on.generation.ListModels(request, metadata=on.metadata_of(api_key))
        )
        return [answers.model_info(model) for model in answer.models]

    async def status(self, *, history: bool = False, api_key: str | None = None) -> Status:
        """Return what the scheduler is doing; with `history`, also what it did in the last ten minutes."""
        request = operations_pb2.GetStatusRequest(history=history)
        answer = await self._core.unary(
            lambda on: on.operations.GetStatus(request, metadata=on.metadata_of(api_key))
        )
        return answers.status(answer.status)

    async def usage(self, since: float | None = None) -> UsageReport:
        """Return who used the devices, minute by minute, in the last `since` seconds or in the last day."""
        request = operations_pb2.GetUsageRequest(since_s=since)
        answer = await self._core.unary(lambda on: on.operations.GetUsage(request, metadata=on.metadata))
        return answers.usage_report(answer)

    async def watch_status(self, interval: float = 1.0, *, history: bool = False) -> AsyncGenerator[Status]:
        """Yield a status now and then again each `interval` seconds, until the scheduler goes away.

        With `history` the first one has that of the last ten minutes, and each that follows what is new.
        """
        interval_ms = requests.milliseconds("interval_ms", interval)
        request = operations_pb2.WatchStatusRequest(interval_ms=interval_ms, history=history)
        connection = await self._core.endpoints.dial()
        try:
            rpc = connection.operations.WatchStatus(request, metadata=connection.metadata)
            async for answer in rpc:
                yield answers.status(answer.status)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            await connection.close()

    async def serving(self, timeout: float = 2.0) -> bool:  # noqa: ASYNC109 # its passing is an answer
        """Return whether the service takes work: it answers in time, has a worker, and is not draining."""
        try:
            async with asyncio.timeout(timeout):
                return await self._core.serving()
        except (OctavoError, TimeoutError):
            return False

    async def drain(
        self, worker_id: str | None = None, *, grace: float | None = None, endpoint: str | None = None
    ) -> DrainResult:
        """Stop admitting: the whole scheduler, or one worker until its process is started anew.

        What runs is finished. A scheduler cuts it off after `grace` seconds, if given, and then ends.
        It is asked once, and no other scheduler in its place. `endpoint` says which, of several.

        Raises:
            InvalidRequestError: the client has several endpoints and none of them is named.
        """
        grace_ms = None if grace is None else requests.milliseconds("grace_ms", grace)
        request = operations_pb2.DrainRequest(worker_id=worker_id, grace_ms=grace_ms)
        answer = await self._core.once(
            endpoint, lambda on: on.operations.Drain(request, metadata=on.metadata)
        )
        return DrainResult(answer.running, answer.waiting)

    async def pin_prefix(
        self,
        name: str,
        prefix: Prompt | Messages,
        *,
        model: str = "",
        cache_salt: str = "",
        tenant: str | None = None,
        **options: Unpack[TemplateOptions],
    ) -> PinResult:
        """Keep the full blocks of a prefix in the KV memory of workers, whatever the load.

        A second pin of the same name replaces the first.

        Args:
            name: names the pin, within its model.
            prefix: text, token ids, or the first messages of a conversation. Text is a prompt as
                `generate` takes it; what `chat` takes are messages.
            model: where several are served.
            cache_salt: as in the requests that share the prefix.
            tenant: whose requests it is for. Absent is the tenant of this client's key.
            options: how messages are rendered.

        Raises:
            UnsupportedError: no worker has room for it within its pin budget.
        """
        fields = {"model": model, "cache_salt": cache_salt, "tenant": tenant, **options}
        request = requests.pin_request(name, prefix, fields)
        answer = await self._core.unary(lambda on: on.operations.PinPrefix(request, metadata=on.metadata))
        return PinResult(answer.tokens, answer.blocks, answer.workers, tuple(answer.without_room))

    async def unpin_prefix(self, name: str, *, model: str = "") -> int:
        """Let a pinned prefix go and return the blocks that it had.

        Raises:
            NotFoundError: there is none of that name.
        """
        request = operations_pb2.UnpinPrefixRequest(name=name, model=model)
        answer = await self._core.unary(lambda on: on.operations.UnpinPrefix(request, metadata=on.metadata))
        return answer.blocks

    async def audit(self, worker_id: str | None = None) -> list[WorkerAudit]:
        """Have one worker, or all that are attached, verify their books from scratch between two steps."""
        request = operations_pb2.AuditWorkersRequest(worker_id=worker_id)
        answer = await self._core.unary(lambda on: on.operations.AuditWorkers(request, metadata=on.metadata))
        return [answers.audit(one) for one in answer.audits]

    async def aclose(self) -> None:
        """Cancel what runs and close the connections."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None:
            core.abandon()

    def _start(self, request: pb.GenerateRequest) -> AsyncStream:
        return AsyncStream(self._core.transport(), self._core.prepare(request))
