"""Send the worst bodies one by one to a stack of real processes, and note what each does to it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from octavo.stack import Child, Stack
from octavo.v1 import common_pb2, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

from octavo_lab.hardening.documents import routes, worst_documents
from octavo_lab.hardening.messages import Body, Rpc, rpcs, worst_messages
from octavo_lab.hardening.neighbour import Door, Neighbour

GRPC_BYTES: Final = (16 << 20) - 1024
"""What a scheduler takes in a message, nearly."""
HTTP_BYTES: Final = (8 << 20) - 1024
"""What a gateway takes as a body, nearly."""
_ANSWER_S: Final = 60.0
_HEARD_S: Final = 1.0
"""After so long an answer that goes on is left."""
_WORKER: Final = "/octavo.v1.Worker/"
_OURS: Final = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE")
"""Answers that put the fault on the service, beside those of HTTP."""
_NONE: Final = "no answer"


@dataclass(frozen=True, slots=True)
class Effect:
    """What one body did."""

    door: str
    body: str
    answer: str
    wall_s: float
    pause_s: float
    """Longest wait of the neighbour for a token meanwhile."""
    growth_bytes: int
    """Of the process that grew most, from before the siege to its peak under this body."""

    @property
    def is_blamed_on_us(self) -> bool:
        """Whether the answer is one that no input may have."""
        words = self.answer.split()
        return (
            self.answer.startswith(("5", _NONE))
            or self.wall_s >= _ANSWER_S
            or any(word in words for word in _OURS)
        )

    def __str__(self) -> str:
        return (
            f"{self.pause_s * 1000:7.0f} ms  {self.growth_bytes / 2**20:6.0f} MiB  {self.wall_s:6.2f} s  "
            f"{self.answer:24}  {self.door}  {self.body}"
        )


@dataclass(slots=True)
class Siege:
    """What was found on a stack; `only` is a shell-style pattern on `DOOR BODY`."""

    stack: Stack
    grpc_bytes: int = GRPC_BYTES
    http_bytes: int = HTTP_BYTES
    only: str = "*"
    stride: int = 1
    """Every so many bodies one is sent."""
    on_effect: Callable[[Effect], None] = lambda _: None
    effects: list[Effect] = field(default_factory=list)
    calm_s: float = 0.0
    """Longest wait of the neighbour without a body, over as many seconds as each door was settled for."""
    harmed: int = 0
    """Streams of the neighbour that broke or said something else."""

    def run(self, doors: tuple[Door, ...] = ("grpc", "http")) -> None:
        """Try every body at these doors.

        Raises:
            StackError: a process ended.
            TimeoutError: the neighbour is served no more.
        """
        for door in doors:
            if door == "grpc":
                self._at(door, self.stack.endpoint, self._messages())
            elif self.stack.gateway is not None:
                self._at(door, self.stack.gateway.address, self._documents(self.stack.gateway.address))

    def _at(
        self, door: Door, address: str, attacks: Iterator[tuple[str, Body, Callable[[bytes], str]]]
    ) -> None:
        with Neighbour(door, address) as neighbour:
            while not neighbour.streams:
                neighbour.settle()
            self._load_libraries()
            neighbour.forget()
            time.sleep(1.0)
            self.calm_s = max(self.calm_s, neighbour.longest_wait_s())
            resident = {child.name: _peak_bytes(child) for child in self.stack.children}
            for name, body, send in islice(attacks, 0, None, self.stride):
                if fnmatchcase(f"{name} {body.name}", self.only):
                    self._try(name, body, send, neighbour, resident)
            self.harmed += neighbour.harmed

    def _load_libraries(self) -> None:
        """Have done once what loads libraries at its first use: their memory is no harm of a body."""
        constraint = common_pb2.StructuredOutput(json_object=True)
        asked = pb.GenerateRequest(
            text="a", sampling=common_pb2.SamplingParams(max_tokens=1, structured=constraint)
        )
        with grpc.insecure_channel(self.stack.endpoint) as channel:
            for _ in generation_pb2_grpc.GenerationStub(channel).Generate(asked, timeout=_ANSWER_S):
                pass

    def _try(
        self,
        door: str,
        body: Body,
        send: Callable[[bytes], str],
        neighbour: Neighbour,
        resident: dict[str, int],
    ) -> None:
        data = body.build()
        neighbour.settle()
        neighbour.forget()
        for child in self.stack.children:
            _reset_peak(child)
        began = time.monotonic()
        answer = send(data)
        wall_s = time.monotonic() - began
        self.stack.check()
        neighbour.settle()
        growth = max(_peak_bytes(child) - resident[child.name] for child in self.stack.children)
        effect = Effect(door, body.name, answer, wall_s, neighbour.longest_wait_s(), growth)
        self.effects.append(effect)
        self.on_effect(effect)

    def _messages(self) -> Iterator[tuple[str, Body, Callable[[bytes], str]]]:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        worker = self.stack.workers[0].address
        with (
            grpc.insecure_channel(self.stack.endpoint, options) as channel,
            grpc.insecure_channel(worker, options) as to_worker,
        ):
            for rpc in rpcs():
                # A scheduler is a worker's only client, and its plans may be large; strangers get no further.
                one = to_worker if rpc.path.startswith(_WORKER) else channel
                key = self.stack.worker_secret if one is to_worker else None
                for body in worst_messages(rpc.message, self.grpc_bytes):
                    yield rpc.path, body, lambda data, rpc=rpc, one=one, key=key: call(one, rpc, data, key)  # type: ignore[misc]

    def _documents(self, address: str) -> Iterator[tuple[str, Body, Callable[[bytes], str]]]:
        document = json.loads(_ask(address, "GET", "/openapi.json", b"")[1])
        for route in routes(document):
            for body in worst_documents(document, route, self.http_bytes):
                yield (
                    f"{route.method} {route.path}",
                    body,
                    lambda data, route=route: _ask(address, route.method, route.path, data)[0],  # type: ignore[misc]
                )


def call(channel: grpc.Channel, rpc: Rpc, data: bytes, key: str | None = None) -> str:
    """Send bytes as the only message of a call; return the code, and the worst error in its events."""
    errors, began = set[str](), time.monotonic()
    # The sort of call is the server's to know: to the wire all are the same.
    answers: Any = channel.stream_stream(rpc.path, None, None)(
        iter([data]), timeout=_ANSWER_S, metadata=(("authorization", f"Bearer {key}"),) if key else ()
    )
    try:
        for answer in answers:
            if rpc.path.endswith("/Session"):
                errors |= {event.error.reason for event in pb.SessionEvent.FromString(answer).events}
            if time.monotonic() - began > _HEARD_S:
                answers.cancel()
                break
    except grpc.RpcError as error:
        return str(error.code().name)
    return " ".join(["OK", *sorted(errors - {""})])


def _ask(address: str, method: str, path: str, body: bytes) -> tuple[str, bytes]:
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return str(answer.status), answer.read()
    except OSError as error:
        return f"{_NONE}: {type(error).__name__}", b""
    finally:
        connection.close()


def _processes(child: Child) -> list[psutil.Process]:
    root = psutil.Process(child.process.pid)
    return [root, *root.children(recursive=True)]


def _peak_bytes(child: Child) -> int:
    """Return what a child and all that it started held at most since the peak was reset."""
    total = 0
    for one in _processes(child):
        for line in Path(f"/proc/{one.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def _reset_peak(child: Child) -> None:
    for one in _processes(child):
        Path(f"/proc/{one.pid}/clear_refs").write_text("5")


def worst(effects: list[Effect], key: Callable[[Effect], Any], count: int = 10) -> list[str]:
    """Return the effects that stand out, the worst first."""
    return [str(one) for one in sorted(effects, key=key, reverse=True)[:count]]
