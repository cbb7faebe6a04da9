"""The child process that compiles grammars: reads constraints from stdin, writes what they come to.

A grammar can make a compiler take any time and any memory, or crash it, and nothing but the end of its
process stops it. Frames are a little-endian uint64 length and a pickle; both ends are this program.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import numpy as np
from octavo.sampling import StructuredOutput
from octavo.service.memory import return_what_is_freed

from worker_svc.grammar.backend import (
    WORD_BITS,
    CompiledGrammar,
    GrammarBackend,
    GrammarError,
    Vocabulary,
    allowed_ids,
)
from worker_svc.grammar.backends import Backends

HEADER: Final = struct.Struct("<Q")
COMPILE_LIMIT_S: Final = 5
"""What compiling one constraint may take, of the CPU."""
MAX_GRAMMAR_BYTES: Final = 48 << 20
"""What a compiled grammar may take."""
_MEMORY_BYTES: Final = 1 << 30
"""What compiling may take beside what the process has when it begins."""
_NICENESS: Final = 10
_TRIALS: Final = 2
_TRIAL_TOKENS: Final = 32
_TRIAL_LIMIT_S: Final = 0.5
"""What so many masks may take."""


def read_frame(stream: IO[bytes]) -> object:
    """Return the next message; raises EOFError when the other end is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)  # noqa: S301 - from our own


def write_frame(stream: IO[bytes], message: object) -> None:
    """Send a message."""
    data = pickle.dumps(message, protocol=5)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Take the vocabulary and say that we listen, then compile until there is nothing more."""
    vocabulary = read_frame(requests)
    assert isinstance(vocabulary, Vocabulary)
    backends = Backends(vocabulary)
    write_frame(replies, None)
    while True:
        structured = read_frame(requests)
        assert isinstance(structured, StructuredOutput)
        write_frame(replies, _answer(backends, structured))


def _answer(backends: Backends, structured: StructuredOutput) -> bytes | GrammarError:
    try:
        # Not within the limits: a library may have to be loaded first.
        backend = backends.of(structured)
        with _limited():
            return _compiled(backend, structured)
    except MemoryError:
        return GrammarError("compiling it takes too much memory")
    except GrammarError as error:
        return error


def _compiled(backend: GrammarBackend, structured: StructuredOutput) -> bytes:
    compiled = backend.compile(structured)
    if compiled.size_bytes > MAX_GRAMMAR_BYTES:
        megabytes, most = compiled.size_bytes / 2**20, MAX_GRAMMAR_BYTES / 2**20
        raise GrammarError(f"it compiles to {megabytes:.0f} MiB, and {most:.0f} are allowed")
    _try(compiled, backend.vocabulary)
    return backend.serialize(compiled)


def _try(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Make masks of a few outputs: a grammar may compile at once and then take minutes for each token.

    Raises:
        GrammarError: masks take too long. What takes forever, the parent ends.
    """
    stops = frozenset(vocabulary.stop_token_ids)
    mask = np.zeros(-(-vocabulary.size // WORD_BITS), dtype=np.int32)
    for seed in range(_TRIALS):
        draw = random.Random(seed)  # noqa: S311 - alike in each process
        matcher = compiled.matcher(stops)
        began = time.thread_time()
        for _ in range(_TRIAL_TOKENS):
            matcher.fill(mask)
            allowed = allowed_ids(mask)
            if not allowed.size:
                break
            token_id = int(allowed[draw.randrange(allowed.size)])
            if token_id in stops or not matcher.accept(token_id):
                break
        if (took_s := time.thread_time() - began) > _TRIAL_LIMIT_S:
            raise GrammarError(f"{_TRIAL_TOKENS} tokens under it take {took_s:.1f} s")


@contextmanager
def _limited() -> Iterator[None]:
    """Let the system end this process when it takes too much time or memory for one constraint.

    Time of the CPU, so that a busy machine is nobody's fault.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime + COMPILE_LIMIT_S) + 1}
    with suppress(OSError):  # Where there is no /proc, time must do.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + _MEMORY_BYTES
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for limit in limits:
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    """Run the child."""
    # A terminal's Ctrl-C reaches the whole group; the parent decides when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    return_what_is_freed()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a library prints must not end up between the replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, replies)
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main()
