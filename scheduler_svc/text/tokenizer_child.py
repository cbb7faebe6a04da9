"""The child process that tokenizes: reads jobs from stdin, writes results to stdout.

Frames are a little-endian uint64 length and a pickle; both ends are this program. The child ends when
stdin does, so that it never outlives its parent.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
from typing import IO, Final

from octavo.service.memory import return_what_is_freed

from scheduler_svc.text.chat import InputError
from scheduler_svc.text.tokenization import Job, JobFailure, TextModel, TextSpec

HEADER: Final = struct.Struct("<Q")
# A template can ask for any amount of memory; a large prompt needs far less than this.
_MAX_ADDRESS_SPACE: Final = 16 << 30


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Say that we listen, then answer jobs until there are no more."""
    models: dict[str, TextModel] = {}
    _send(replies, None)
    # A parent that is killed may leave half a job behind.
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        (size,) = HEADER.unpack(header)
        if len(data := requests.read(size)) < size:
            return
        message: TextSpec | Job = pickle.loads(data)  # noqa: S301 - from our parent
        _send(replies, _answer(models, message))


def _send(replies: IO[bytes], reply: object) -> None:
    data = pickle.dumps(reply, protocol=5)
    replies.write(HEADER.pack(len(data)) + data)
    replies.flush()


def _answer(models: dict[str, TextModel], message: TextSpec | Job) -> object:
    try:
        if isinstance(message, TextSpec):
            models[message.model] = TextModel(message)
            return None
        return models[message.model].run(message)
    except InputError as error:
        return JobFailure(error.problem, error.field, error.reason)
    except Exception as error:  # noqa: BLE001 - the parent decides what it means
        return JobFailure(f"{type(error).__name__}: {error}")


def main() -> None:
    """Run the child."""
    # A terminal's Ctrl-C reaches the whole group; the parent decides when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(_MAX_ADDRESS_SPACE, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return_what_is_freed()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a library prints must not end up between the replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, replies)
    except BrokenPipeError:
        # The parent was killed. There is nobody to tell, and no buffer to flush into a pipe without a reader.
        os._exit(0)


if __name__ == "__main__":
    main()
