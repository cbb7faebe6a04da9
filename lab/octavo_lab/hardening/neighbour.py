"""A client in a process of its own that streams all the time, and notes how long it waited for a token."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal, Self

import grpc
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

Door = Literal["grpc", "http"]
_TOKENS: Final = 2000
_PROMPT: Final = "the neighbour"
_TIMEOUT_S: Final = 300.0
_PAUSE_S: Final = 0.05
_LAST, _LONGEST, _STREAMS, _HARMED = range(4)


@dataclass(slots=True)
class Neighbour:
    """Use it in a `with` statement."""

    door: Door
    address: str
    _process: Any = None
    _shared: Any = None

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._shared = context.Array("d", [time.monotonic(), 0.0, 0.0, 0.0], lock=False)
        self._process = context.Process(
            target=_stream_for_ever, args=(self.door, self.address, self._shared), daemon=True
        )
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def streams(self) -> int:
        """Streams that it has read to their end."""
        return int(self._shared[_STREAMS])

    @property
    def harmed(self) -> int:
        """Streams that broke, or said something else than the first one."""
        return int(self._shared[_HARMED])

    def forget(self) -> None:
        """Begin to look for the longest wait anew."""
        self._shared[_LONGEST] = 0.0

    def longest_wait_s(self) -> float:
        """Return the longest wait for a token since it was forgotten, the one that goes on included."""
        return max(float(self._shared[_LONGEST]), time.monotonic() - float(self._shared[_LAST]))

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until it is served again; raises TimeoutError."""
        give_up_at, before = time.monotonic() + timeout_s, time.monotonic()
        while self._shared[_LAST] <= before:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the neighbour got no token for {timeout_s:g} s")
            time.sleep(0.001)


def _stream_for_ever(door: Door, address: str, shared: Any) -> None:
    expected, parent = "", os.getppid()
    while os.getppid() == parent:
        pieces: list[str] = []
        shared[_LAST] = time.monotonic()
        try:
            for piece in _over_grpc(address) if door == "grpc" else _over_http(address):
                now = time.monotonic()
                # The first token waits in a queue, which others may have filled: that is no pause.
                if len(pieces) != 1:
                    shared[_LONGEST] = max(shared[_LONGEST], now - shared[_LAST])
                shared[_LAST] = now
                pieces.append(piece)
        except _NoRoom:
            time.sleep(_PAUSE_S)
            continue
        except (grpc.RpcError, OSError, http.client.HTTPException, ValueError):
            traceback.print_exc()
            pieces = []
        text = "".join(pieces)
        expected = expected or text
        if text != expected or not text:
            # For who looks for the reason.
            sys.stderr.write(f"the neighbour got {len(pieces)} pieces that end in {text[-60:]!r}\n")
            shared[_HARMED] += 1
            time.sleep(_PAUSE_S)
        shared[_STREAMS] += 1


class _NoRoom(Exception):
    """The queue is full, and the answer says to come again."""


def _over_grpc(address: str) -> Iterator[str]:
    """Yield nothing when the request has been accepted, then the token ids of each delta."""
    sampling = common_pb2.SamplingParams(max_tokens=_TOKENS, seed=11, ignore_eos=True)
    request = pb.GenerateRequest(text=_PROMPT, sampling=sampling, return_token_ids=True)
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        try:
            for event in stub.Generate(request, timeout=_TIMEOUT_S):
                # Tokens of two steps may come in one delta.
                yield "".join(f"{token} " for token in event.delta.token_ids)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _NoRoom from None
            raise


def _over_http(address: str) -> Iterator[str]:
    """Yield nothing when the answer has begun, then each piece of text."""
    body = {"prompt": _PROMPT, "max_tokens": _TOKENS, "seed": 11, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise _NoRoom
        yield ""
        done = False
        while line := answer.readline():
            if line.startswith(b"data: {"):
                yield str(json.loads(line[6:])["choices"][0]["text"])
            done = done or line.startswith(b"data: [DONE]")
        if not done:
            raise ConnectionError(f"the stream broke off after status {answer.status}")
    finally:
        connection.close()
