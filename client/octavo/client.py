"""The synchronous client: the asynchronous one on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar, Unpack

from octavo._sdk import requests
from octavo._sdk.batch import Batch
from octavo._sdk.call import Call
from octavo._sdk.loop_thread import LoopThread
from octavo._sdk.session import Transport
from octavo.aio import AsyncClient
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
    Prompt,
    TemplateOptions,
    Tokenization,
    WorkerAudit,
)
from octavo.v1 import generation_pb2 as pb

_T = TypeVar("_T")


class Stream:
    """Output of one request, as it comes: iterate over it, once, on any thread.

    The request is cancelled, on the server too, by `close()`, on leaving `with`, and when the stream is
    dropped before its end. Deltas that were not fetched yet are merged.
    """

    def __init__(self, thread: LoopThread, transport: Transport, request: pb.GenerateRequest) -> None:
        thread.check()
        self._thread = thread
        self._transport = transport
        self._change = threading.Event()
        self._call = Call(request, self._change.set, live=True)
        transport.post(transport.submit, self._call)

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        self._thread.check_process()
        call = self._call
        while True:
            # Read first: what came before the end is there when the end is.
            done = call.done
            delta = call.take()
            if delta is not None:
                return delta
            if done:
                if call.error is not None:
                    raise call.error
                raise StopIteration
            self._change.wait()
            self._change.clear()

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._call.done:
            self._transport.post(self._transport.cancel, self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_call", None) is not None:
            self.close()


class Client:
    """Speaks to one Octavo service. Safe to use from many threads; not across a fork.

    Takes the arguments of `AsyncClient`. Close it, or use it in a `with` statement; a client that is
    dropped, or alive when the interpreter ends, closes itself.
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
        self._aio = AsyncClient(
            endpoint,
            api_key=api_key,
            tls=tls,
            connect_timeout=connect_timeout,
            reconnect_timeout=reconnect_timeout,
        )
        self._core = self._aio._core  # noqa: SLF001 # one client with two faces
        self._thread = LoopThread()
        self._transport = self._thread.run(self._open())

    async def _open(self, *, paced: bool = False) -> Transport:
        return self._core.transport(paced=paced)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Return the whole output for a prompt.

        Raises:
            OctavoError: the request was refused or failed; see `octavo.errors`.
        """
        return self._thread.run(self._aio.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Start a request and return its output as it comes; raises as `generate` does."""
        return self._start(requests.text_request(prompt, options))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> GenerateResult:
        """Return the whole answer in a conversation; raises as `generate` does."""
        return self._thread.run(self._aio.chat(messages, **options))

    def chat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream:
        """Start the answer in a conversation and return it as it comes; raises as `generate` does."""
        return self._start(requests.chat_request(messages, options))

    def embed(self, inputs: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> EmbeddingResult:
        """Return the vectors of a text, of token ids, or of a list of either; see `AsyncClient.embed`."""
        return self._thread.run(self._aio.embed(inputs, **options))

    def batch(
        self, prompts: Iterable[Prompt | BatchItem], **options: Unpack[GenerateOptions]
    ) -> list[GenerateResult | OctavoError]:
        """Return the outcome of each prompt, in order; one that fails has its error there."""
        ends = dict(self.batch_iter(prompts, **options))
        return [ends[index] for index in range(len(ends))]

    def batch_iter(
        self, prompts: Iterable[Prompt | BatchItem], **options: Unpack[GenerateOptions]
    ) -> Iterator[tuple[int, GenerateResult | OctavoError]]:
        """Yield (index of the prompt, outcome) as they come; see `AsyncClient.batch_iter`.

        The iterable runs on the thread of the caller, and may use this client.
        """
        ended: SimpleQueue[int] = SimpleQueue()
        batch = Batch(self._core, prompts, options, ended.put)
        transport = self._thread.run(self._open(paced=True))
        try:
            while True:
                while ended.empty() and batch.may_pull():
                    if (call := batch.pull()) is not None:
                        self._thread.check()
                        transport.post(transport.submit, call)
                if not batch.under_way:
                    return
                self._thread.check_process()
                yield batch.take(ended.get())
        finally:
            for call in batch.calls:
                transport.post(transport.cancel, call)

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, pieces: bool = False
    ) -> Tokenization:
        """Return the token ids of a text."""
        return self._thread.run(
            self._aio.tokenize(text, model=model, add_special_tokens=add_special_tokens, pieces=pieces)
        )

    def tokenize_chat(
        self, messages: Messages, *, model: str = "", pieces: bool = False, **options: Unpack[TemplateOptions]
    ) -> Tokenization:
        """Return the token ids of a conversation, rendered with the model's template."""
        return self._thread.run(self._aio.tokenize_chat(messages, model=model, pieces=pieces, **options))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids."""
        return self._thread.run(
            self._aio.detokenize(token_ids, model=model, keep_special_tokens=keep_special_tokens)
        )

    def models(self) -> list[ModelInfo]:
        """Return the models that are served."""
        return self._thread.run(self._aio.models())

    def status(self, *, history: bool = False) -> Status:
        """Return what the scheduler is doing; with `history`, also what it did in the last ten minutes."""
        return self._thread.run(self._aio.status(history=history))

    def usage(self, since: float | None = None) -> UsageReport:
        """Return who has used the devices, minute by minute; see `AsyncClient.usage`."""
        return self._thread.run(self._aio.usage(since))

    def watch_status(self, interval: float = 1.0, *, history: bool = False) -> Iterator[Status]:
        """Yield a status now and then again each `interval` seconds; see `AsyncClient.watch_status`."""
        return self._iterate(self._aio.watch_status(interval, history=history))

    def drain(
        self, worker_id: str | None = None, *, grace: float | None = None, endpoint: str | None = None
    ) -> DrainResult:
        """Stop admitting: the whole scheduler, or one worker; see `AsyncClient.drain`."""
        return self._thread.run(self._aio.drain(worker_id, grace=grace, endpoint=endpoint))

    def pin_prefix(
        self,
        name: str,
        prefix: Prompt | Messages,
        *,
        model: str = "",
        cache_salt: str = "",
        tenant: str | None = None,
        **options: Unpack[TemplateOptions],
    ) -> PinResult:
        """Keep a prefix in the KV memory of workers, whatever the load; see `AsyncClient.pin_prefix`."""
        return self._thread.run(
            self._aio.pin_prefix(name, prefix, model=model, cache_salt=cache_salt, tenant=tenant, **options)
        )

    def unpin_prefix(self, name: str, *, model: str = "") -> int:
        """Let a pinned prefix go and return the blocks that it had."""
        return self._thread.run(self._aio.unpin_prefix(name, model=model))

    def audit(self, worker_id: str | None = None) -> list[WorkerAudit]:
        """Have one worker, or all, verify their books from scratch between two steps."""
        return self._thread.run(self._aio.audit(worker_id))

    def close(self) -> None:
        """Cancel what runs and close the connections."""
        if self._thread.usable:
            self._thread.run(self._aio.aclose())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest) -> Stream:
        return Stream(self._thread, self._transport, self._core.prepare(request))

    def _iterate(self, source: AsyncGenerator[_T]) -> Iterator[_T]:
        async def following() -> tuple[_T] | None:
            async for item in source:
                return (item,)
            return None

        try:
            while (item := self._thread.run(following())) is not None:
                yield item[0]
        finally:
            self._thread.spawn(source.aclose())
