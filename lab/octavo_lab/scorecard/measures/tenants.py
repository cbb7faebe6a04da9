"""Tenants beside each other: what they are charged, and what one feels of another's worst."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import grpc.aio
import numpy as np
from octavo.aio import AsyncClient
from octavo.keys import hash_of, new_key
from octavo.stack import Stack
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc

from octavo_lab.load.arrivals import Poisson
from octavo_lab.load.records import Outcome, RunRecord
from octavo_lab.load.target import LoadTarget
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
from octavo_lab.overload.drive import Mix, drive
from octavo_lab.scorecard import Measurement, at_most, entry, system

_SIM: Final = ("--runner", "sim", "--sim-speed", "8")
_AT_ONCE: Final = 4


class Keys:
    """Keys of tenants, in a file: `operator` may see the status, the others have quotas."""

    def __init__(self, **quotas: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="octavo-keys-")) / "keys.toml"
        self._keys = {name: new_key() for name in ("operator", *quotas)}
        tables = [f"[tenants.{name}]\n{quotas.get(name, '')}\n" for name in self._keys]
        entries = [
            f'[[keys]]\nid = "{name}"\nhash = "{hash_of(key)}"\ntenant = "{name}"\n'
            f'roles = ["{"operator" if name == "operator" else "user"}"]\n'
            for name, key in self._keys.items()
        ]
        self.path.write_text("".join((*tables, *entries)))

    def __getitem__(self, tenant: str) -> str:
        return self._keys[tenant]

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        """Return what a call of a tenant carries."""
        return (("authorization", f"Bearer {self[tenant]}"),)


@contextmanager
def guarded(keys: Keys, **settings: Any) -> Iterator[Stack]:
    """A stack with these keys."""
    arguments = ("--key-file", str(keys.path), *settings.pop("scheduler_args", ()))
    os.environ["OCTAVO_API_KEY"] = keys["operator"]
    with system.running(scheduler_args=arguments, **settings) as stack:
        yield stack


@asynccontextmanager
async def generation(endpoint: str) -> AsyncIterator[Any]:
    """The service as a client sees it that speaks the protocol itself."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        # The stubs' types know the synchronous kind only.
        yield cast("Any", generation_pb2_grpc.GenerationStub(channel))


def request(number: int, prompt: int, output: int, **fields: Any) -> pb.GenerateRequest:
    """Return a request for so many tokens whose prompt shares no prefix with one of another number."""
    ids = [3 + (number >> shift) % 240 for shift in (0, 6, 12)]
    made = pb.GenerateRequest(request_id=str(number), skip_text=True, **fields)
    made.tokens.ids.extend(ids * (1 + prompt // 3))
    made.sampling.max_tokens, made.sampling.ignore_eos = output, True
    return made


# -- neighbours

_WINDOWS: Final = 4
_WINDOW_S: Final = 15.0
_SMALLEST: Final = """
requests_in_flight = 1
requests_per_minute = 60
tokens_per_minute = 3000
waiting_requests = 1
waiting_tokens = 1000
tokenizer_bytes_per_minute = 1_000_000
"""
_LOAD: Final = Mix(prompt_tokens=(64, 192), output_tokens=(32, 96), vocabulary=(3, 250))


@entry("hardening.neighbour_ttft_ratio", "ratio", at_most(1.5), long=True)
def neighbour_ttft_ratio() -> Measurement:
    """P99 time to first token of a tenant beside four processes that do their worst, over the calm one

    Two are strangers without a key, two a tenant with the smallest quotas; for a minute in four windows, each
    after a calm one. They have a core of their own and the service has the others, calm or not: what is
    measured is what they take of the service, not of the machine. The worse of both doors; infinite when
    something of the tenant's was refused or failed.
    """
    return _beside_attackers("ttft")


@entry("hardening.neighbour_itl_ratio", "ratio", at_most(1.5), long=True)
def neighbour_itl_ratio() -> Measurement:
    """P99 time between tokens of a tenant beside four processes that do their worst, over the calm one

    As above. OCTAVO_ATTACKS, a shell-style pattern on their names, looks for the one that does the harm.
    """
    return _beside_attackers("itl")


def _beside_attackers(figure: str) -> Measurement:
    calm, storm, answers = _windows()
    ratios = {door: storm[door][figure] / calm[door][figure] for door in calm}
    unharmed = all(found["bad"] == 0 for found in storm.values())
    details = {"calm": calm, "storm": storm, "ratios": ratios, "answers": answers}
    return Measurement(max(ratios.values()) if unharmed else math.inf, details)


_Figures = dict[str, dict[str, Any]]
"""P99s in seconds, and what did not end well, by door."""


@cache
def _windows() -> tuple[_Figures, _Figures, dict[str, int]]:
    """Return what calm windows and those beside attackers were like, and how the attackers were answered."""
    return asyncio.run(_beside())


async def _beside() -> tuple[_Figures, _Figures, dict[str, int]]:
    keys = Keys(neighbour="", poor=_SMALLEST)
    calm, storm, answers = (
        defaultdict[str, list[RunRecord]](list),
        defaultdict[str, list[RunRecord]](list),
        Counter[str](),
    )
    with (
        _a_core_for_others() as core,
        guarded(keys, model="sim", worker_args=("--runner", "sim"), gateway_port=0) as stack,
    ):
        http = OpenAiConfig(base_url=system.base_url(stack), api_key=keys["neighbour"])
        async with (
            OctavoTarget(stack.endpoint, api_key=keys["neighbour"]) as grpc_door,
            OpenAiTarget(http) as http_door,
        ):
            doors: dict[str, LoadTarget] = {"grpc": grpc_door, "http": http_door}
            for window in range(_WINDOWS):
                await _load(doors, calm, window)
                attackers = [_attacker(stack, key, core) for key in ("", "", keys["poor"], keys["poor"])]
                try:
                    await _load(doors, storm, window)
                finally:
                    for one in attackers:
                        answers += await _answers(one)
    figures = [{door: _figures(runs) for door, runs in found.items()} for found in (calm, storm)]
    return figures[0], figures[1], dict(answers)


@contextmanager
def _a_core_for_others() -> Iterator[int]:
    """Keep this process and all that it starts off one core, where there are several, and return that one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    try:
        yield min(cores)
    finally:
        os.sched_setaffinity(0, cores)


async def _load(doors: Mapping[str, LoadTarget], found: dict[str, list[RunRecord]], window: int) -> None:
    """Drive both doors for a window, and add how it went to what was found."""
    drives = (
        drive(door, _LOAD, Poisson(2.0), warm_up_s=3.0, seconds=_WINDOW_S, seed=7 + window + 100 * place)
        for place, door in enumerate(doors.values())
    )
    for door, run in zip(doors, await asyncio.gather(*drives), strict=True):
        found[door].append(run)


def _figures(runs: Sequence[RunRecord]) -> dict[str, Any]:
    measured = [one for run in runs for one in run.measured]
    ok = [one for one in measured if one.outcome is Outcome.OK]
    bad = Counter(f"{one.outcome} {one.reason}" for one in measured if one.outcome is not Outcome.OK)
    gaps = [gap for one in ok for gap in one.gaps_s]
    first = [one.ttft_s for one in ok if one.ttft_s is not None]
    p99 = {name: _p99(values) for name, values in (("ttft", first), ("itl", gaps))}
    return {**p99, "requests": len(measured), "bad": bad.total(), "reasons": dict(bad.most_common(5))}


def _p99(values: Sequence[float]) -> float:
    """Return the P99, infinite of nothing."""
    return float(np.quantile(values, 0.99)) if values else math.inf


def _attacker(stack: Stack, key: str, core: int) -> subprocess.Popen[bytes]:
    arguments = ("octavo_lab.scorecard.attackers", stack.endpoint, system.gateway(stack).address)
    attacker = subprocess.Popen(  # noqa: S603 # our own module
        (sys.executable, "-m", *arguments, str(_WINDOW_S), os.environ.get("OCTAVO_ATTACKS", "*")),
        env={**os.environ, "OCTAVO_API_KEY": key},
        stdout=subprocess.PIPE,
    )
    os.sched_setaffinity(attacker.pid, {core})
    return attacker


async def _answers(attacker: subprocess.Popen[bytes]) -> Counter[str]:
    """Return how often an attacker was answered with what."""
    try:
        said, _ = await asyncio.to_thread(attacker.communicate, timeout=60)
    except subprocess.TimeoutExpired:
        attacker.kill()
        return Counter({"it hangs": 1})
    return Counter(json.loads(said or "{}"))


# -- quotas


@entry("hardening.quota_error", "ratio", at_most(0.01))
async def quota_error() -> Measurement:
    """tokens and bytes that tenants were charged against what workers and tokenizers computed, off by

    Resumes, cancels before and after the first token, n choices, paced sessions, and tokenizing, a tenant for
    each. What workers computed is read from their own metrics; the bytes are those of the calls answered.
    """
    kinds = {"resumes": _resume, "cancels": _cancel, "choices": _choices, "paced": _paced}
    keys = Keys(**dict.fromkeys((*kinds, "tokenizing"), "tokens_per_minute = 4_000_000_000"))
    with guarded(keys, model="sim", worker_args=_SIM, metrics=True) as stack:
        async with generation(stack.endpoint) as stub, AsyncClient(stack.endpoint) as watcher:
            tokenizing = asyncio.create_task(_tokenize(stub, keys.metadata("tokenizing")))
            await asyncio.gather(*(run(stub, keys.metadata(name)) for name, run in kinds.items()))
            sent = await tokenizing
            status = await system.until_idle(watcher, num_workers=1)
            said = system.metrics(f"http://{stack.metrics_addresses[stack.workers[0].name]}")
    computed = sum(map(float, re.findall(r"^octavo_worker_tokens_total\{.*\} (\S+)", said, re.MULTILINE)))
    charged = {one.tenant: one.prompt_tokens + one.output_tokens for one in status.tenants}
    read = next(one.tokenized_bytes for one in status.tenants if one.tenant == "tokenizing")
    errors = {
        "tokens": abs(sum(charged.values()) - computed) / computed,
        "bytes": abs(read - sent) / sent,
    }
    details = {"computed tokens": computed, "charged tokens": charged, "off by": errors}
    return Measurement(max(errors.values()), {**details, "outcomes": dict(status.outcomes)})


async def _each(count: int, ask: Callable[[int], Awaitable[None]]) -> None:
    """Ask so often, a few at once."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            await ask(number)

    await asyncio.gather(*map(one, range(count)))


async def _resume(stub: Any, metadata: Any) -> None:
    async def ask(number: int) -> None:
        resumed = [pb.ResumedChoice(token_ids=[3 + (number + place) % 240 for place in range(300)])]
        async for _ in stub.Generate(request(number, 200, 310, resume=resumed), metadata=metadata):
            pass

    await _each(60, ask)


async def _cancel(stub: Any, metadata: Any) -> None:
    async def ask(number: int) -> None:
        call = stub.Generate(request(100_000 + number, 2000, 500), metadata=metadata)
        await call.read()
        # It is accepted: some are left at once, some in their prefill, some while they decode.
        await asyncio.sleep(0.01 * (number % 20))
        call.cancel()

    await _each(100, ask)


async def _choices(stub: Any, metadata: Any) -> None:
    async def ask(number: int) -> None:
        asked = request(200_000 + number, 400, 100)
        asked.sampling.n = 8
        async for _ in stub.Generate(asked, metadata=metadata):
            pass

    await _each(10, ask)


async def _paced(stub: Any, metadata: Any) -> None:
    async def session(number: int) -> None:
        call = stub.Session(metadata=metadata)
        await call.write(pb.SessionRequest(open=pb.OpenSession(paced=True)))
        first = 300_000 + 1000 * number
        sent = ended = 0
        while ended < 20:
            message: pb.SessionEvent = await call.read()
            for _ in range(min(message.credits, 20 - sent)):
                await call.write(pb.SessionRequest(generate=request(first + sent, 300, 40)))
                sent += 1
            ended += sum(event.WhichOneof("event") in {"finished", "error"} for event in message.events)
        await call.done_writing()

    await _each(8, session)


async def _tokenize(stub: Any, metadata: Any) -> int:
    """Return the bytes of the calls, all of which are answered."""
    sent = 0

    async def ask(number: int) -> None:
        nonlocal sent
        asked = pb.TokenizeRequest(text=f"{number} {system.PROMPT}" * (1 + number % 50))
        await stub.Tokenize(asked, metadata=metadata)
        sent += asked.ByteSize()

    await _each(300, ask)
    return sent
