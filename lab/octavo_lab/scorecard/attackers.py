"""Callers that do their worst: a stranger without a key, and a tenant with the smallest quota.

`python -m octavo_lab.scorecard.attackers SCHEDULER GATEWAY SECONDS [PATTERN]`, with the tenant's key in
OCTAVO_API_KEY, or none. Prints how often each attack was answered with what.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

_GENERATION: Final = "/octavo.v1.Generation/"
_WATCH: Final = "/grpc.health.v1.Health/Watch"
_MIB: Final = 1 << 20
_ANSWER_S: Final = 10.0
_PAUSE_S: Final = 0.01


def _packed(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _part(message: Any, field: str, data: bytes) -> bytes:
    """Return a field as it is on the wire, by hand: many objects would take the attacker's memory."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    number = message.DESCRIPTOR.fields_by_name[field].number
    return bytes((number << 3 | 2, *length, size)) + data


def _asked(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(max_tokens=4, **sampling))


@dataclass
class Attacker:
    """One process of one caller."""

    scheduler: str
    gateway: str
    until: float
    """When it stops, in monotonic seconds."""
    key: str | None
    only: str = "*"
    """Shell-style pattern on the names of attacks."""
    channel: Any = None
    http: Any = None
    answers: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(os.getpid() * 1000))

    async def run(self) -> None:
        """Attack until the time is over."""
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        async with (
            grpc.aio.insecure_channel(self.scheduler, options=options) as self.channel,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWER_S)) as self.http,
        ):
            attacks: dict[str, tuple[Callable[[], Awaitable[str]], int]] = {
                "health.Watch": (self.watch, 2100),
                "half a header": (self.half_a_header, 150),
                "a message of 15 MiB": (self.large_message, 8),
                "detokenize -1": (self.post("/detokenize", {"tokens": [-1] * 2_500_000}), 1),
                "objects for a prompt": (self.post("/v1/completions", {"prompt": [{}] * 300_000}), 1),
                "a long name": (self.post("/v1/completions", {"p" * (4 * _MIB): 1}), 1),
                "a list for a text": (self.post("/tokenize", {"prompt": [[]] * 1_000_000}), 1),
            }
            if self.key is not None:
                attacks |= self._of_a_tenant()
            await asyncio.gather(
                *(self._again(name, *what) for name, what in attacks.items() if fnmatchcase(name, self.only)),
                return_exceptions=True,
            )

    def _of_a_tenant(self) -> dict[str, tuple[Callable[[], Awaitable[str]], int]]:
        generate, sampling = _GENERATION + "Generate", common_pb2.SamplingParams
        stop_ids = _part(sampling, "stop_token_ids", b"\3" * 5_000_000)
        biases = _asked(n=24, logit_bias=dict.fromkeys(range(49152), 1.0))
        strings = _part(sampling, "stop", b"a") * 4_000_000
        turns = _part(pb.Chat, "messages", b"\x0a\4user") * 1_900_000
        empty = _part(pb.GenerateRequests, "requests", b"") * 7_900_000

        def extended(part: bytes, **more: Any) -> Callable[[], Awaitable[str]]:
            return self.send(generate, _packed(_asked(**more)) + _part(pb.GenerateRequest, "sampling", part))

        chat = _part(pb.GenerateRequest, "chat", turns) + _part(pb.GenerateRequest, "model", b"\xff")
        text = _packed(pb.TokenizeRequest(text="ab " * 20_000))
        return {
            "stop ids": (extended(stop_ids, n=32), 2),
            "biases": (self.send(generate, _packed(biases)), 2),
            "stop strings": (extended(strings), 1),
            "no UTF-8 at the end": (self.send(generate, chat), 1),
            "empty requests": (
                self.send(_GENERATION + "Session", _part(pb.SessionRequest, "generate_many", empty)),
                1,
            ),
            "tokenize": (self.send(_GENERATION + "Tokenize", text), 500),
            "128 choices": (self.send(generate, _packed(_asked(n=128))), 2),
            "a grammar": (self.grammar, 2),
            "resume": (self.resume, 2),
            "cancel": (self.cancel, 2),
            "paced": (self.paced, 20),
        }

    async def _again(self, name: str, attack: Callable[[], Awaitable[str]], at_once: int) -> None:
        async def one() -> None:
            while time.monotonic() < self.until:
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        answer = await attack()
                except grpc.aio.AioRpcError as error:
                    answer = error.code().name
                except (OSError, TimeoutError, aiohttp.ClientError, grpc.aio.UsageError) as error:
                    answer = type(error).__name__
                self.answers[f"{name}: {answer}"] += 1
                await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(one() for _ in range(at_once)))

    # Attacks -------------------------------------------------------------------------------------

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def send(self, method: str, message: bytes) -> Callable[[], Awaitable[str]]:
        """Return what sends a message as it is, and reads all that comes."""

        async def attack() -> str:
            call: Any = self.channel.stream_stream(method)(iter((message,)), metadata=self._metadata)
            async for _ in call:
                pass
            return "OK"

        return attack

    def post(self, path: str, body: Any) -> Callable[[], Awaitable[str]]:
        """Return what posts a body."""
        data = json.dumps(body, separators=(",", ":")).encode()
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"

        async def attack() -> str:
            async with self.http.post(f"http://{self.gateway}{path}", data=data, headers=headers) as answer:
                await answer.read()
                return str(answer.status)

        return attack

    async def watch(self) -> str:
        """Hold a place of the port."""
        call: Any = self.channel.unary_stream(_WATCH)(b"")
        async for _ in call:
            pass
        return "OK"

    async def large_message(self) -> str:
        """Send what is too much for nobody, without a key, and never end it."""

        async def halves() -> Any:
            yield b"\x1a\x80\x80\xc0\x07" + b"a" * (15 * _MIB)
            await asyncio.sleep(_ANSWER_S)

        call: Any = self.channel.stream_stream(_GENERATION + "Session")(halves())
        async for _ in call:
            pass
        return "OK"

    async def half_a_header(self) -> str:
        """Connect to the gateway and say half of what is to be said."""
        host, _, port = self.gateway.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 1000)
            await writer.drain()
            return (await reader.read(12)).decode(errors="replace") or "closed"
        finally:
            writer.close()

    async def resume(self) -> str:
        """Have many tokens computed for one new one."""
        number = next(self.numbers)
        asked = _asked()
        asked.sampling.max_tokens, asked.sampling.ignore_eos, asked.skip_text = 801, True, True
        asked.resume.add(token_ids=[3 + (number + place) % 240 for place in range(800)])
        return await self.send(_GENERATION + "Generate", _packed(asked))()

    async def grammar(self) -> str:
        """Have a constraint compiled that was never seen before, and takes long."""
        innermost = f'{{"const": {next(self.numbers)}}}'
        schema = '{"type":"array","items":' * 90 + innermost + "}" * 90
        asked = _asked(structured=common_pb2.StructuredOutput(json_schema=schema))
        return await self.send(_GENERATION + "Generate", _packed(asked))()

    async def cancel(self) -> str:
        """Have a prompt computed, and go."""
        ids = [3 + next(self.numbers) % 240 for _ in range(2000)]
        asked = pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), sampling=_asked().sampling)
        call: Any = self.channel.unary_stream(_GENERATION + "Generate")(
            _packed(asked), metadata=self._metadata
        )
        await call.read()
        call.cancel()
        return "cancelled"

    async def paced(self) -> str:
        """Use up every credit in the highest class."""
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        answers.put_nowait(_packed(pb.SessionRequest(open=pb.OpenSession(paced=True))))

        async def messages() -> Any:
            while time.monotonic() < self.until:
                yield await answers.get()

        call: Any = self.channel.stream_stream(_GENERATION + "Session")(messages(), metadata=self._metadata)
        async for data in call:
            for _ in range(pb.SessionEvent.FromString(data).credits):
                asked = _asked()
                asked.request_id = str(next(self.numbers))
                asked.terms.priority = common_pb2.PRIORITY_INTERACTIVE
                answers.put_nowait(_packed(pb.SessionRequest(generate=asked)))
        return "OK"


def main() -> None:
    """Attack."""
    scheduler, gateway, seconds, only = (*sys.argv[1:], "*")[:4]
    key = os.environ.get("OCTAVO_API_KEY") or None
    attacker = Attacker(scheduler, gateway, time.monotonic() + float(seconds), key, only)
    asyncio.run(attacker.run())
    print(json.dumps(attacker.answers))


if __name__ == "__main__":
    main()
