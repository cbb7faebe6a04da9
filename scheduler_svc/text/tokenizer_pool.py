"""Child processes that tokenize, so that the event loop never does.

A thread would not do: `tokenizers` holds the interpreter's lock while it encodes (measured: 600 ms for
120,000 tokens), and so does everything in Python around it. A child that crashes or takes too long is
replaced; its job is tried again after a crash, never after a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog

from scheduler_svc.errors import ServiceError
from scheduler_svc.text.detokenizer import TokenTable
from scheduler_svc.text.tokenization import (
    Decode,
    Encoded,
    EncodeJob,
    Job,
    JobFailure,
    MakeTable,
    TextSpec,
    Tokenize,
)
from scheduler_svc.text.tokenizer_child import HEADER
from scheduler_svc.text.turns import TokenizerTurns

_log = structlog.get_logger()

_LARGE_BYTES: Final = 64 * 1024
MAX_PENDING: Final = 1024
_MAX_PENDING_BYTES: Final = 64 << 20
# Children may crash for reasons that have nothing to do with the job, so it is tried again.
_MAX_ATTEMPTS: Final = 3
_LOAD_TIMEOUT_S: Final = 60.0
_LAST_BREATH_S: Final = 1.0
_PAUSE_S: Final = 0.2
# How long a job waits for a child that cannot be started: files and memory may come back in a moment.
_START_PATIENCE_S: Final = 10.0
# A tokenizer that did not load may do so later, when it was memory that it lacked.
_RELOAD_S: Final = 30.0


class _Crashed(Exception):
    """The child is gone."""


class _CannotStart(Exception):
    """The system gives no process now; the message says why."""


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose job it is."""

    lane: str
    """Lanes take turns, by bytes."""
    charge: Callable[[int], None]
    """Called with the bytes of a job when a child begins to work on it."""


NOBODY: Final = Payer("", lambda _: None)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A job on its way."""

    job: Job
    size_bytes: int
    payer: Payer
    done: asyncio.Future[object]
    since: float
    attempts: int = 0

    @property
    def lane(self) -> str:
        """Whose turn it waits for."""
        return self.payer.lane


class _Child:
    """One child process. Whatever goes wrong with it ends it; `start` makes a new one."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.loaded: set[str] = set()

    async def start(self) -> None:
        """Start the process unless it runs, and wait until it listens.

        Raises:
            _CannotStart: the system is out of processes, files or memory.
            _Crashed: it ended before it did.
            TimeoutError: it took too long and was killed.
        """
        if self._process is not None:
            return
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "scheduler_svc.text.tokenizer_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
                # One core for each prompt: a worker on the same machine needs the others.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise _CannotStart(error.strerror or str(error)) from None
        await self._converse(self._process, _LOAD_TIMEOUT_S)

    async def exchange(self, message: TextSpec | Job, timeout_s: float) -> object:
        """Return the child's reply.

        Raises:
            _Crashed: the child ended instead of answering.
            TimeoutError: it took too long and was killed.
        """
        process = self._process
        if process is None:
            raise _Crashed
        data = pickle.dumps(message, protocol=5)
        return await self._converse(process, timeout_s, HEADER.pack(len(data)), data)

    async def stop(self, *, dead: bool = False) -> None:
        """End the process, whatever it is doing. `dead`: it is about to be gone by itself."""
        process, self._process = self._process, None
        self.loaded.clear()
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if dead:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LAST_BREATH_S)
                return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _converse(
        self, process: asyncio.subprocess.Process, timeout_s: float, *message: bytes
    ) -> object:
        """Send a message, if any, and return the next one that comes."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                for part in message:
                    process.stdin.write(part)
                await process.stdin.drain()
                (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
                return pickle.loads(await process.stdout.readexactly(size))  # noqa: S301 - our child
        except TimeoutError:
            await self.stop()
            raise
        # uvloop raises RuntimeError for a pipe whose other end is known to be gone.
        except (asyncio.IncompleteReadError, OSError, RuntimeError):
            await self.stop(dead=True)
            raise _Crashed from None
        except BaseException:
            # Also when cancelled: a reply nobody waits for must not be taken for the next one.
            await self.stop()
            raise


class TokenizerPool:
    """Runs jobs on child processes. With two or more, large inputs leave the first one free."""

    def __init__(self, size: int, timeout_s: float, max_pending: int = MAX_PENDING) -> None:
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._specs: dict[str, TextSpec] = {}
        self._small: TokenizerTurns[_Ticket] = TokenizerTurns()
        self._large: TokenizerTurns[_Ticket] = TokenizerTurns()
        self._broken: dict[str, tuple[JobFailure, float]] = {}
        """Tokenizers that did not load, with why and when."""
        self._crashed_loads: Counter[str] = Counter()
        self._pending_bytes: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        """Bytes and jobs that wait, by lane."""
        self._wakes = [asyncio.Event() for _ in range(size)]
        self._children = [_Child() for _ in range(size)]
        self._tasks: list[asyncio.Task[NoReturn]] = []

    def start(self) -> list[asyncio.Task[NoReturn]]:
        """Begin to serve; child processes come with the first model.

        Returns the tasks that do: should a bug end one, jobs may wait for ever.
        """
        self._tasks = [
            asyncio.create_task(
                self._serve(index, takes_large=index > 0 or len(self._wakes) == 1), name=f"tokenizer {index}"
            )
            for index in range(len(self._wakes))
        ]
        return self._tasks

    async def close(self) -> None:
        """End all child processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def load(self, spec: TextSpec) -> TokenTable | None:
        """Load a model in every child; return its token table, or None when it can have none.

        Raises:
            ServiceError: its tokenizer cannot be loaded.
        """
        self._specs[spec.model] = spec
        result = await self._run(MakeTable(spec.model), 0, NOBODY)
        assert result is None or isinstance(result, TokenTable)
        return result

    async def encode(self, job: EncodeJob, size_bytes: int, payer: Payer = NOBODY) -> Encoded:
        """Return the prompt of an input.

        Raises:
            ServiceError: the input cannot become a prompt, or too many wait for it.
        """
        result = await self._run(job, size_bytes, payer)
        assert isinstance(result, Encoded)
        return result

    async def tokenize(self, job: Tokenize, size_bytes: int, payer: Payer = NOBODY) -> bytes:
        """Return a serialized octavo.v1.TokenizeResponse; raises as `encode` does."""
        result = await self._run(job, size_bytes, payer)
        assert isinstance(result, bytes)
        return result

    async def decode(self, job: Decode, payer: Payer = NOBODY) -> str:
        """Return the text of tokens; raises as `encode` does."""
        result = await self._run(job, len(job.tokens), payer)
        assert isinstance(result, str)
        return result

    async def _run(self, job: Job, size_bytes: int, payer: Payer) -> object:
        self._make_room(payer.lane, size_bytes)
        loop = asyncio.get_running_loop()
        ticket = _Ticket(job, size_bytes, payer, loop.create_future(), loop.time())
        self._enqueue(ticket)
        result = await ticket.done
        if isinstance(result, JobFailure):
            if result.field is not None:
                raise ServiceError.invalid((result.field, result.problem), reason=result.reason)
            problem = f"the tokenizer failed: {result.problem}"
            if result.reason == "TOKENIZER_CRASHED":
                raise ServiceError("TOKENIZER_CRASHED", problem)
            raise ServiceError("TOKENIZER_FAILED", problem, retry_after_s=1.0)
        return result

    def _make_room(self, lane: str, size_bytes: int) -> None:
        """When too much waits, the lane with the most gives up what came last.

        Raises:
            ServiceError: that is the newcomer's own.
        """
        while (pending := len(self._small) + len(self._large)) and (
            pending >= self._max_pending or self._pending_bytes.total() + size_bytes > _MAX_PENDING_BYTES
        ):
            full = pending >= self._max_pending
            held, more = (self._pending, 1) if full else (self._pending_bytes, size_bytes)
            fullest = max(held, key=held.__getitem__, default=lane)
            refusal = ServiceError("QUEUE_FULL", "too many prompts wait to be tokenized", retry_after_s=1.0)
            if held[lane] + more >= held[fullest]:
                raise refusal
            ticket = self._large.pop_newest(fullest) or self._small.pop_newest(fullest)
            assert ticket is not None
            self._taken(ticket)
            if not ticket.done.done():
                ticket.done.set_exception(refusal)

    def _taken(self, ticket: _Ticket) -> None:
        for held, much in ((self._pending, 1), (self._pending_bytes, ticket.size_bytes)):
            held[ticket.lane] -= much
            if not held[ticket.lane]:
                del held[ticket.lane]

    def _enqueue(self, ticket: _Ticket) -> None:
        queue = self._large if ticket.size_bytes > _LARGE_BYTES else self._small
        queue.push(ticket)
        self._pending[ticket.lane] += 1
        self._pending_bytes[ticket.lane] += ticket.size_bytes
        for wake in self._wakes:
            wake.set()

    def _next(self, *, takes_large: bool) -> _Ticket | None:
        """Return the next job that somebody still waits for."""
        for queue in (self._small, self._large) if takes_large else (self._small,):
            while (ticket := queue.pop()) is not None:
                self._taken(ticket)
                if not ticket.done.done():
                    return ticket
        return None

    async def _serve(self, index: int, *, takes_large: bool) -> NoReturn:
        wake, child = self._wakes[index], self._children[index]
        told = ""
        try:
            while True:
                wake.clear()
                try:
                    ready, told = await self._prepare(child), ""
                except _CannotStart as problem:
                    if told != str(problem):
                        told = str(problem)
                        _log.error("tokenizer_cannot_start", problem=told)
                    self._refuse_stale(told, takes_large=takes_large)
                    ready = False
                if not ready:
                    await asyncio.sleep(_PAUSE_S)
                elif (ticket := self._next(takes_large=takes_large)) is not None:
                    await self._answer(child, ticket)
                else:
                    await wake.wait()
        finally:
            await child.stop()

    def _refuse_stale(self, problem: str, *, takes_large: bool) -> None:
        """Refuse the jobs that have waited too long for a child."""
        until = asyncio.get_running_loop().time() - _START_PATIENCE_S
        for queue in (self._small, self._large) if takes_large else (self._small,):
            while (ticket := queue.pop_older(until)) is not None:
                self._taken(ticket)
                if not ticket.done.done():
                    refusal = f"no process can be started to tokenize: {problem}"
                    ticket.done.set_exception(ServiceError("QUEUE_FULL", refusal, retry_after_s=1.0))

    def _missing(self, child: _Child) -> set[str]:
        """Return the models that a child has to load."""
        since = asyncio.get_running_loop().time() - _RELOAD_S
        broken = {model for model, (_, at) in self._broken.items() if at > since}
        return self._specs.keys() - child.loaded - broken

    async def _prepare(self, child: _Child) -> bool:
        """Give a child the models that it does not have; return whether it is ready for jobs.

        Raises:
            _CannotStart: there is no child, and none can be started.
        """
        while missing := self._missing(child):
            model = missing.pop()
            if model in self._broken:
                # One child tries it again, while the others go on.
                self._broken[model] = self._broken[model][0], asyncio.get_running_loop().time()
            try:
                await child.start()
                reply = await child.exchange(self._specs[model], _LOAD_TIMEOUT_S)
                self._crashed_loads[model] = 0
            except (_Crashed, TimeoutError):
                self._crashed_loads[model] += 1
                _log.warning("tokenizer_crashed_while_loading", model=model)
                if self._crashed_loads[model] < _MAX_ATTEMPTS:
                    return False
                reply = JobFailure("its process ends while it loads the tokenizer")
            except (MemoryError, pickle.UnpicklingError) as error:
                reply = JobFailure(repr(error))
            if isinstance(reply, JobFailure):
                self._broken[model] = reply, asyncio.get_running_loop().time()
                _log.error("tokenizer_load_failed", model=model, problem=reply.problem)
            else:
                child.loaded.add(model)
                self._broken.pop(model, None)
        return True

    async def _answer(self, child: _Child, ticket: _Ticket) -> None:
        ticket.attempts += 1
        model = ticket.job.model
        result: object = None
        try:
            if model not in child.loaded and model in self._broken:
                result, _ = self._broken[model]
            else:
                if ticket.attempts == 1:
                    ticket.payer.charge(ticket.size_bytes)
                result = await child.exchange(ticket.job, self._timeout_s)
        except TimeoutError:
            _log.warning("tokenizer_timeout", model=model, size_bytes=ticket.size_bytes)
            result = JobFailure(f"it took longer than {self._timeout_s:g} s")
        except _Crashed:
            _log.warning("tokenizer_crashed", model=model, attempts=ticket.attempts)
            if ticket.attempts < _MAX_ATTEMPTS:
                self._enqueue(ticket)
                return
            result = JobFailure("its process crashed on this input", reason="TOKENIZER_CRASHED")
        except Exception as error:  # noqa: BLE001 - logged; the next job must not suffer
            _log.exception("tokenizer_failed", model=model)
            result = JobFailure(repr(error))
        if not ticket.done.done():
            ticket.done.set_result(result)
