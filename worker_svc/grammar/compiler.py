"""Compiles each constraint once, away from the engine, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Final

import structlog
from octavo.sampling import StructuredOutput

from worker_svc.grammar.backend import CompiledGrammar, GrammarError, Vocabulary
from worker_svc.grammar.backends import Backends
from worker_svc.grammar.child import COMPILE_LIMIT_S, read_frame, write_frame
from worker_svc.grammar.threads import Threads

ANSWER_LIMIT_S: Final = 300.0
"""The child limits itself; this is for what goes wrong with it on a busy machine."""
MAX_CACHED: Final = 1024
MAX_CACHED_BYTES: Final = 256 << 20
_START_LIMIT_S: Final = 60.0
log = structlog.get_logger(__name__)


class CompilerLost(GrammarError):
    """The compiler did not come to an end, so another attempt may."""


class CompilerChild:
    """A process that compiles one constraint at a time. It is replaced when it takes too long, or dies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it listens.

        Raises:
            CompilerLost: it does not start.
        """
        with self._starting:
            if self._closed:
                raise CompilerLost("the worker ends")
            if self._process is not None:
                return
            # It ends with the thread that starts it; what libraries warn of is nobody's to read.
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "octavo._child", str(os.getpid()), "worker_svc.grammar.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        self._ask(self._vocabulary, _START_LIMIT_S, "the compiler of grammars does not start")

    def compile(self, structured: StructuredOutput) -> bytes:
        """Return a compiled grammar for `GrammarBackend.deserialize`.

        Raises:
            GrammarError: it cannot be compiled, or not within its bounds.
            CompilerLost: the same, and nobody knows why.
        """
        self.start()
        answer = self._ask(structured, ANSWER_LIMIT_S, "the compiler fails on it")
        if isinstance(answer, GrammarError):
            raise answer
        assert isinstance(answer, bytes)
        return answer

    def close(self) -> None:
        """End the process, for good."""
        with self._starting:
            self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _ask(self, message: object, limit_s: float, failure: str) -> object:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            write_frame(process.stdin, message)
            return read_frame(process.stdout)
        except (EOFError, OSError):
            # What a limit of the system ends, ends at once.
            process.wait()
            too_long = late.is_set() or process.returncode == -signal.SIGXCPU
            self._end()
            log.warning("grammar_compiler_lost", timed_out=too_long)
            problem = f"it takes longer than {COMPILE_LIMIT_S} s to compile" if too_long else failure
            raise CompilerLost(problem) from None
        finally:
            timer.cancel()


class GrammarCompiler:
    """Constraints to compiled grammars, each once while the cache holds it. Used from one thread."""

    def __init__(self, backends: Backends, child: CompilerChild) -> None:
        self._backends = backends
        self._child = child
        self._thread = Threads(1, "grammar-compiler")
        self._cache: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()
        self._cached_bytes = 0
        self._counting = threading.Lock()

    def warm_up(self) -> None:
        """Start what compiles, so that no request waits for that."""
        self._thread.submit(self._child.start)

    def get(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        """Return the grammar of a constraint, which may be on its way; its error is a GrammarError."""
        found = self._cache.get(structured)
        if found is None or _is_lost(found):
            self._shrink()
            found = self._cache[structured] = self._thread.submit(self._compile, structured)
            found.add_done_callback(lambda done: self._count(done, 1))
        self._cache.move_to_end(structured)
        return found

    def close(self) -> None:
        """End what is under way."""
        self._thread.close()
        self._child.close()

    def _compile(self, structured: StructuredOutput) -> CompiledGrammar:
        return self._backends.of(structured).deserialize(self._child.compile(structured))

    def _shrink(self) -> None:
        """Make room for one more; what is used by sequences lives on with them."""
        while len(self._cache) >= MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            structured, oldest = next(iter(self._cache.items()))
            if not oldest.done():
                return
            del self._cache[structured]
            self._count(oldest, -1)

    def _count(self, grammar: Future[CompiledGrammar], sign: int) -> None:
        if grammar.exception() is None:
            with self._counting:
                self._cached_bytes += sign * grammar.result().size_bytes


def _is_lost(grammar: Future[CompiledGrammar]) -> bool:
    return grammar.done() and isinstance(grammar.exception(), CompilerLost | OSError)
