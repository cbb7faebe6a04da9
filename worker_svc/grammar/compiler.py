"""Compiles each constraint once, away from the engine, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import structlog
from octavo.sampling import StructuredOutput

from worker_svc.grammar.backend import CompiledGrammar, GrammarBackend, GrammarError
from worker_svc.grammar.child import read_frame, write_frame
from worker_svc.grammar.threads import Threads
from worker_svc.grammar.xgrammar_backend import Vocabulary

COMPILE_LIMIT_S: Final = 10.0
MAX_CACHED: Final = 1024
MAX_CACHED_BYTES: Final = 256 << 20
_START_LIMIT_S: Final = 60.0
_REFUSAL_BYTES: Final = 1024
"""What a constraint that cannot be compiled counts as."""
log = structlog.get_logger(__name__)


class CompilerLost(GrammarError):
    """The compiler did not come to an end, so another attempt may."""


class CompilerChild:
    """A process that compiles one constraint at a time. It is replaced when it takes too long, or dies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it listens.

        Raises:
            CompilerLost: it does not start.
        """
        if self._process is None:
            # It ends with the thread that starts it; what xgrammar warns of is nobody's to read.
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
        answer = self._ask(structured, COMPILE_LIMIT_S, "the compiler fails on it")
        if isinstance(answer, GrammarError):
            raise answer
        assert isinstance(answer, bytes)
        return answer

    def close(self) -> None:
        """End the process."""
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
            self.close()
            log.warning("grammar_compiler_lost", timed_out=late.is_set())
            problem = f"it takes longer than {limit_s:g} s to compile" if late.is_set() else failure
            raise CompilerLost(problem) from None
        finally:
            timer.cancel()


class GrammarCompiler:
    """Constraints to compiled grammars, each once while the cache holds it. Used from one thread."""

    def __init__(self, backend: Callable[[], GrammarBackend], child: CompilerChild) -> None:
        self._make_backend = backend
        self._backend: GrammarBackend | None = None
        self._child = child
        self._thread = Threads(1, "grammar-compiler")
        self._cache: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()

    def warm_up(self) -> None:
        """Start what compiles, so that no request waits for that."""
        self._thread.submit(self._start)

    def get(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        """Return the grammar of a constraint, which may be on its way; its error is a GrammarError."""
        found = self._cache.get(structured)
        if found is None or _is_lost(found):
            self._shrink()
            found = self._cache[structured] = self._thread.submit(self._compile, structured)
        self._cache.move_to_end(structured)
        return found

    def close(self) -> None:
        """End what is under way."""
        self._thread.close()
        self._child.close()

    def _compile(self, structured: StructuredOutput) -> CompiledGrammar:
        return self._start().deserialize(self._child.compile(structured))

    def _start(self) -> GrammarBackend:
        if self._backend is None:
            self._backend = self._make_backend()
        self._child.start()
        return self._backend

    def _shrink(self) -> None:
        """Make room for one more; what is used by sequences lives on with them."""
        sizes = {structured: _size_of(grammar) for structured, grammar in self._cache.items()}
        total = sum(sizes.values())
        for structured, size in sizes.items():
            if len(self._cache) < MAX_CACHED and total <= MAX_CACHED_BYTES:
                return
            if self._cache[structured].done():
                total -= size
                del self._cache[structured]


def _is_lost(grammar: Future[CompiledGrammar]) -> bool:
    return grammar.done() and isinstance(grammar.exception(), CompilerLost | OSError)


def _size_of(grammar: Future[CompiledGrammar]) -> int:
    if not grammar.done() or grammar.exception() is not None:
        return _REFUSAL_BYTES
    return grammar.result().size_bytes
