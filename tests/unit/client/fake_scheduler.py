"""A scheduler without workers: a real gRPC server whose tokens are a function of seed and position."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
from octavo.v1 import common_pb2, operations_pb2, operations_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

FREE_RUN = 1_000_000
WAIT_S = 60
"""Patience with what is certain to come; it ends hangs and proves nothing."""


def token_id(seed: int, choice: int, position: int) -> int:
    return (seed * 7919 + choice * 104729 + position * 31) % 50_000


MODEL = pb.Model(
    id="fake",
    aliases=["other"],
    max_model_len=2048,
    workers=1,
    generation_defaults=common_pb2.SamplingParams(temperature=0.2, top_k=0),
)


def token_text(token: int) -> str:
    return f"é{token} "


def expected_text(seed: int, count: int, choice: int = 0) -> str:
    return "".join(token_text(token_id(seed, choice, at)) for at in range(count))


@dataclass(slots=True)
class _Choice:
    request: pb.GenerateRequest
    index: int
    seed: int
    tokens: list[int]
    shown: int
    done: bool = False


@dataclass(slots=True, eq=False)
class _Session:
    live: dict[str, list[_Choice]] = field(default_factory=dict)
    outbox: asyncio.Queue[pb.SessionEvent | None] = field(default_factory=asyncio.Queue)
    paced: bool = False


class FakeOperations(operations_pb2_grpc.OperationsServicer):
    """Three workers, one of them lost and one of another scheduler, and a queue."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        """Workers; an empty name is the scheduler."""
        self.on_drain: Callable[[], object] = lambda: None
        self.pins: list[operations_pb2.PinPrefixRequest] = []

    status = operations_pb2.Status(
        scheduler_id="fake-1",
        version="0.1.0",
        uptime_s=3725,
        arrivals=12,
        live_requests=3,
        rank=1,
        standby="10.0.0.4:50051",
        outcomes={"STOP": 7, "QUEUE_FULL": 2},
        queues=[
            operations_pb2.QueueStatus(
                model="fake", priority=1, waiting=4, waiting_tokens=400, oldest_wait_ms=250
            ),
            operations_pb2.QueueStatus(model="fake", priority=2),
        ],
        workers=[
            operations_pb2.WorkerStatus(
                worker_id="w0",
                model="fake",
                state="ready",
                running=3,
                max_num_seqs=32,
                step_ms=12.5,
                runner="torch",
                limits_reason="32 sequences (set)",
                pool=operations_pb2.PoolStatus(
                    total=100, free=60, evictable=30, active=10, hit_tokens=30, miss_tokens=90
                ),
            ),
            operations_pb2.WorkerStatus(worker_id="w1", model="fake", state="lost"),
            operations_pb2.WorkerStatus(
                worker_id="w2",
                model="fake",
                state="held",
                held_by="fake-2",
                held_by_endpoint="10.0.0.3:50051",
            ),
        ],
        overload=[
            operations_pb2.OverloadStatus(
                model="fake", level=1, backlog=0.62, wait=0.4, misses=0.03, predicted_ttft_ms=900
            )
        ],
        models=[MODEL],
        pins=[operations_pb2.PinStatus(name="support", model="fake", blocks=12, workers=["w0"])],
        rates=operations_pb2.Rates(
            requests_per_s=2.5, output_tokens_per_s=80, ttft_p50_ms=120, ttft_p99_ms=1500
        ),
    )

    async def GetStatus(  # noqa: N802 # named by the contract
        self, request: operations_pb2.GetStatusRequest, context: object
    ) -> operations_pb2.GetStatusResponse:
        status = operations_pb2.Status()
        status.CopyFrom(self.status)
        if request.history:
            status.history.extend(self._points(3600, 3725))
        return operations_pb2.GetStatusResponse(status=status)

    async def WatchStatus(  # noqa: N802 # named by the contract
        self, request: operations_pb2.WatchStatusRequest, context: object
    ) -> AsyncIterator[operations_pb2.WatchStatusResponse]:
        for second in range(3):
            status = operations_pb2.Status()
            status.CopyFrom(self.status)
            if request.history:
                status.history.extend(self._points(3600, 3725) if second == 0 else self._points(3724, 3725))
            yield operations_pb2.WatchStatusResponse(status=status)

    @staticmethod
    def _points(start: int, stop: int) -> list[operations_pb2.HistoryPoint]:
        """A load that rises, with its level and its cost."""
        return [
            operations_pb2.HistoryPoint(
                uptime_s=second,
                level=(second - 3600) // 40,
                waiting=second - 3600,
                rates=operations_pb2.Rates(
                    requests_per_s=second % 7, ttft_p99_ms=10 * (second - 3600), cost_per_1k_tokens=0.002
                ),
            )
            for second in range(start, stop)
        ]

    async def Drain(  # noqa: N802 # named by the contract
        self, request: operations_pb2.DrainRequest, context: object
    ) -> operations_pb2.DrainResponse:
        self.drained.append(request.worker_id)
        threading.Thread(target=self.on_drain).start()
        return operations_pb2.DrainResponse(running=3, waiting=request.grace_ms)

    async def PinPrefix(  # noqa: N802 # named by the contract
        self, request: operations_pb2.PinPrefixRequest, context: object
    ) -> operations_pb2.PinPrefixResponse:
        self.pins.append(request)
        return operations_pb2.PinPrefixResponse(tokens=40, blocks=2, workers=1, without_room=["w1"])

    async def GetUsage(  # noqa: N802 # named by the contract
        self, request: operations_pb2.GetUsageRequest, context: object
    ) -> operations_pb2.GetUsageResponse:
        minutes = [
            operations_pb2.UsageMinute(
                from_unix_ms=start * 60_000,
                until_unix_ms=(start + 1) * 60_000,
                tenants=[
                    operations_pb2.TenantUsage(
                        tenant="a", requests=2, prompt_tokens=30, output_tokens=40, device_s=27.0
                    )
                ],
                idle_device_s=33.0,
            )
            for start in (0, 1)
        ]
        wanted = minutes[1:] if request.HasField("since_s") else minutes
        return operations_pb2.GetUsageResponse(minutes=wanted, price_per_gpu_hour=4.0)

    async def AuditWorkers(  # noqa: N802 # named by the contract
        self, request: operations_pb2.AuditWorkersRequest, context: object
    ) -> operations_pb2.AuditWorkersResponse:
        audits = [
            operations_pb2.WorkerAudit(worker_id="w0", blocks=100, check_ms=1.25),
            operations_pb2.WorkerAudit(worker_id="w1", violation="free + active == total: 99"),
            operations_pb2.WorkerAudit(worker_id="w2", problem="UNAVAILABLE: gone"),
        ]
        wanted = [one for one in audits if not request.worker_id or one.worker_id == request.worker_id]
        return operations_pb2.AuditWorkersResponse(audits=wanted)

    async def UnpinPrefix(  # noqa: N802 # named by the contract
        self, request: operations_pb2.UnpinPrefixRequest, context: object
    ) -> operations_pb2.UnpinPrefixResponse:
        return operations_pb2.UnpinPrefixResponse(blocks=2)


class FakeScheduler(pb_grpc.GenerationServicer):
    """Prompts steer it: `refuse REASON CODE` is refused, `fail REASON CODE` fails after two tokens.

    `allowed` bounds the steps that it takes; a test raises it with `allow`.
    """

    def __init__(self) -> None:
        self.operations = FakeOperations()
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.sessions = 0
        self.adapters = ["fake-sql"]
        self.keys: list[str | None] = []
        """What each session carried as its authorization."""
        self.refusing = ""
        self.refusing_resumed = ""
        self.retry_delay_ms: int | None = 1500
        """When those that are refused are to come back."""
        self.serving: bool | None = None
        """What it says of its health; None is not to know the question."""
        self.may_answer = asyncio.Event()
        """Whether it answers who asks for its health; it stands still otherwise."""
        self.may_answer.set()
        self.asked = 0
        """How often it was asked."""
        self.answering_cancels = True
        self.dying_after_accepted = False
        self.tokenizing = 0
        self.may_tokenize = asyncio.Event()
        self.may_tokenize.set()
        self.accepting: dict[str, int] = {"prompt_tokens": 3}
        self.credits_per_session = 4
        self.most_live = 0
        self._allowed = FREE_RUN
        self._steps = 0
        self._open: set[_Session] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * 1024 * 1024)]
        )
        pb_grpc.add_GenerationServicer_to_server(self, self._server)
        operations_pb2_grpc.add_OperationsServicer_to_server(self.operations, self._server)
        if self.serving is not None:
            check = grpc.unary_unary_rpc_method_handler(self._check)
            service = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
            self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Die: streams break at once, or when they have had their grace."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    async def _check(self, request: bytes, context: object) -> bytes:
        self.asked += 1
        await self.may_answer.wait()
        return b"\x08\x01" if self.serving else b"\x08\x02"

    async def let_go(self, reason: str, endpoint: str = "") -> None:
        """End all requests with this reason, and name a scheduler that has the workers."""
        metadata = {"endpoint": endpoint} if endpoint else {}
        error = common_pb2.Error(code=14, reason=reason, message=f"let go: {reason}", metadata=metadata)
        for session in self._open:
            for request_id in session.live:
                self._send(session, pb.RequestEvent(request_id=request_id, error=error))
            session.live.clear()

    async def tell_no_worker(self, waited_ms: int) -> None:
        """Tell all requests that there is no worker for them."""
        progress = pb.Progress(reason=pb.WAIT_REASON_NO_WORKER, waited_ms=waited_ms)
        for session in self._open:
            for request_id in session.live:
                self._send(session, pb.RequestEvent(request_id=request_id, progress=progress))

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def hold(self, steps: int = 0) -> None:
        self._allowed = self._steps + steps
        await self._notify()

    async def allow(self, steps: int = FREE_RUN) -> None:
        self._allowed += steps
        await self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def Session(  # noqa: N802 # named by the contract
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionEvent],
    ) -> AsyncIterator[pb.SessionEvent]:
        self.sessions += 1
        self.keys.append(dict(context.invocation_metadata() or ()).get("authorization"))
        session = _Session()
        self._open.add(session)
        tasks = [
            asyncio.create_task(self._listen(request_iterator, session)),
            asyncio.create_task(self._step(session)),
        ]
        try:
            while (event := await session.outbox.get()) is not None:
                yield event
        finally:
            for task in tasks:
                task.cancel()
            self._open.discard(session)
            self.cancelled.extend(session.live)
            session.live.clear()
            await asyncio.shield(asyncio.ensure_future(self._notify()))

    async def _listen(self, messages: AsyncIterator[pb.SessionRequest], session: _Session) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "open":
                    session.paced = message.open.paced
                    session.outbox.put_nowait(pb.SessionEvent(credits=self.credits_per_session))
                case "generate":
                    self._admit(message.generate, session)
                case "generate_many":
                    for request in message.generate_many.requests:
                        self._admit(request, session)
                case "cancel":
                    self.cancelled.append(message.cancel.request_id)
                    if self.answering_cancels:
                        self._end_cancelled(message.cancel.request_id, session)
            self.most_live = max(self.most_live, len(session.live))
            await self._notify()
        session.outbox.put_nowait(None)

    def _admit(self, request: pb.GenerateRequest, session: _Session) -> None:
        self.requests.append(request)
        verb, *rest = request.text.split() or [""]
        if refusing := self.refusing or (request.resume and self.refusing_resumed):
            verb, rest = "refuse", [refusing, "14"]
        if verb == "refuse":
            error = common_pb2.Error(
                code=int(rest[1]),
                reason=rest[0],
                message=f"refused: {rest[0]}",
                retry_delay_ms=self.retry_delay_ms,
                violations=[common_pb2.FieldViolation(field="text", description="is bad")],
                metadata={"limit": "7"},
            )
            self._send(session, pb.RequestEvent(request_id=request.request_id, error=error))
            return
        seed = request.sampling.seed if request.sampling.HasField("seed") else 1000 + len(self.requests)
        resumed = {one.choice: one for one in request.resume}
        session.live[request.request_id] = [
            _Choice(
                request,
                index,
                seed,
                list(resumed[index].token_ids) if index in resumed else [],
                resumed[index].shown_bytes if index in resumed else 0,
            )
            for index in range(max(1, request.sampling.n))
        ]
        accepted = pb.Accepted(request_id=request.request_id, seed=seed, queue_position=2, **self.accepting)
        self._send(session, pb.RequestEvent(request_id=request.request_id, accepted=accepted))
        if self.dying_after_accepted:
            session.live.clear()
            session.outbox.put_nowait(None)

    def _end_cancelled(self, request_id: str, session: _Session) -> None:
        for choice in session.live.pop(request_id, []):
            if not choice.done:
                finished = pb.Finished(choice=choice.index, reason=common_pb2.FINISH_REASON_CANCELLED)
                self._send(session, pb.RequestEvent(request_id=request_id, finished=finished))

    def _send(self, session: _Session, event: pb.RequestEvent) -> None:
        session.outbox.put_nowait(pb.SessionEvent(events=[event]))

    async def _step(self, session: _Session) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: session.live and self._steps < self._allowed)
            self._steps += 1
            message = pb.SessionEvent()
            for request_id, choices in list(session.live.items()):
                for choice in choices:
                    if not choice.done:
                        message.events.extend(self._advance(request_id, choice))
                if all(choice.done for choice in choices):
                    del session.live[request_id]
                    message.credits += session.paced
            session.outbox.put_nowait(message)
            await self._notify()
            await asyncio.sleep(0)

    def _advance(self, request_id: str, choice: _Choice) -> list[pb.RequestEvent]:
        words = choice.request.text.split()
        most = choice.request.sampling.max_tokens or 8
        choice.tokens.append(token_id(choice.seed, choice.index, len(choice.tokens)))
        shown = "".join(map(token_text, choice.tokens)).encode()
        text, choice.shown = shown[choice.shown :].decode(), len(shown)
        delta = pb.Delta(choice=choice.index, text=text, token_ids=choice.tokens[-1:])
        if choice.request.sampling.HasField("logprobs"):
            delta.logprobs.add(token_id=choice.tokens[-1], logprob=-0.5, rank=1)
        events = [pb.RequestEvent(request_id=request_id, delta=delta)]
        failing = words[:1] == ["fail"] and len(choice.tokens) == 2
        if failing or len(choice.tokens) >= most:
            choice.done = True
            finished = pb.Finished(
                choice=choice.index,
                reason=common_pb2.FINISH_REASON_LENGTH,
                seed=choice.seed,
                usage=common_pb2.Usage(
                    prompt_tokens=3, completion_tokens=len(choice.tokens), cached_tokens=1
                ),
                timings=common_pb2.Timings(queue_ms=1, ttft_ms=20, tpot_ms=3, total_ms=50),
            )
            if failing:
                finished.reason = (
                    common_pb2.FINISH_REASON_DEADLINE if words[2] == "4" else common_pb2.FINISH_REASON_ERROR
                )
                finished.error.CopyFrom(
                    common_pb2.Error(code=int(words[2]), reason=words[1], message="failed on the way")
                )
            events.append(pb.RequestEvent(request_id=request_id, finished=finished))
        return events

    async def Tokenize(  # noqa: N802 # named by the contract
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        if request.model == "nobody":
            error = common_pb2.Error(code=5, reason="UNKNOWN_MODEL", message="no model 'nobody'")
            trailer = (("octavo-error-bin", error.SerializeToString()),)
            await context.abort(grpc.StatusCode.NOT_FOUND, error.message, trailing_metadata=trailer)
        self.tokenizing += 1
        await self._notify()
        await self.may_tokenize.wait()
        text = request.text or " ".join(one.content for one in request.chat.messages)
        ids = list(text.encode())
        pieces = [chr(one) for one in ids] if request.return_pieces else []
        return pb.TokenizeResponse(token_ids=ids, pieces=pieces, max_model_len=2048)

    async def Detokenize(  # noqa: N802 # named by the contract
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def ListModels(  # noqa: N802 # named by the contract
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        model = pb.Model(adapters=self.adapters)
        model.MergeFrom(MODEL)
        return pb.ListModelsResponse(models=[model])


class ThreadedScheduler:
    """A fake scheduler on an event loop of its own, so that tests may block."""

    def __init__(self) -> None:
        self.fake = FakeScheduler()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.run(self.fake.start)

    def run(self, function: Callable[..., object], *args: object) -> None:
        asyncio.run_coroutine_threadsafe(function(*args), self._loop).result(timeout=WAIT_S + 15)  # type: ignore[arg-type]

    def until(self, condition: Callable[[], bool]) -> None:
        self.run(self.fake.until, condition)

    def close(self) -> None:
        self.run(self.fake.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
