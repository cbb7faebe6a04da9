"""One run: a calm stack answers every question, then it is attacked while it answers them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.stack import StackError
from octavo.status import Status

from octavo_lab.chaos.attack import Attack, Done, heal
from octavo_lab.chaos.links import Links
from octavo_lab.chaos.questions import Question, Reply, difference, questions
from octavo_lab.chaos.report import Findings, longest_gap_s
from octavo_lab.chaos.schedule import KINDS, Action, schedule
from octavo_lab.chaos.stack import ChaosStack, Sizes, running
from octavo_lab.chaos.traffic import PATIENCE_S, Clients

_READY_S: Final = 600.0
_IDLE_S: Final = 60.0
_NUM_QUESTIONS: Final = 30
_MOST_NEW_DESCRIPTORS: Final = 50
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """What to run."""

    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 1
    kinds: Sequence[str] = tuple(KINDS)
    seconds: float = 60.0
    every_s: float = 2.5
    streams: int = 40
    max_tokens: int = 96
    rolling: bool = False
    """Instead of all that: drain everything, one after the other, `every_s` after the last one is back."""
    poison_s: float | None = None
    """Seconds between requests that kill workers; None: there are none."""


def attack(settings: ChaosSettings) -> Findings:
    """Run, and return what was found.

    Raises:
        StackError: the stack cannot start, or does not answer while nothing is done to it.
    """
    with running(settings.sizes, poisoned=settings.poison_s is not None) as (stack, links):
        return asyncio.run(_run(settings, stack, links))


async def _run(settings: ChaosSettings, stack: ChaosStack, links: Links) -> Findings:
    keeper = asyncio.create_task(stack.keep_running())
    await stack.settled(_READY_S)
    async with AsyncClient(stack.endpoints) as client:
        model = (await client.models())[0]
    traffic = Clients(stack, model.id)
    asked = questions(settings.seed, _NUM_QUESTIONS, settings.max_tokens)
    (_, sdk), *_ = traffic.clients(1)
    calm = await asyncio.gather(*(traffic.ask("calm", sdk, question) for question in asked))
    for answer in calm:
        if answer.error:
            raise StackError(f"the calm stack does not answer: {answer.error}")
    await stack.settled(_IDLE_S)
    before = stack.resources()
    traffic.answers.clear()

    began = time.monotonic()
    attacker = Attack(stack, links)
    poisons: list[Reply] = []
    over = asyncio.Event()
    streams = [
        asyncio.create_task(traffic.stream(f"{kind}-{number}", ask, asked, over))
        for number, (kind, ask) in enumerate(traffic.clients(settings.streams))
    ]
    if settings.poison_s is not None:
        poison = _poison(stack, attacker.done, settings.poison_s, over, poisons)
        streams.append(asyncio.create_task(poison))
    if settings.rolling:
        await attacker.roll(settings.every_s)
    else:
        plan = (settings.seed, settings.kinds, settings.seconds, settings.every_s)
        await attacker.perform(schedule(*plan, settings.sizes.watchdog_s), began)
        await asyncio.sleep(began + settings.seconds - time.monotonic())
    heal(stack, links)
    over.set()
    await asyncio.wait(streams, timeout=PATIENCE_S + 10.0)
    found = {**asdict(settings), "kinds": list(settings.kinds), "logs": str(stack.folder)}
    report = Findings(found, attacker.done, traffic.answers, began, longest_gap_s(calm))
    await traffic.aclose()
    _compare(report, calm, poisons)
    await _audit(report, stack, before)
    keeper.cancel()
    report.findings += [f"a process ended of itself: {death}" for death in stack.deaths]
    return report


async def _poison(
    stack: ChaosStack, done: list[Done], every_s: float, over: asyncio.Event, answers: list[Reply]
) -> None:
    """Send a request that kills whoever computes it, every so many seconds, until it is over."""
    question = Question(-1, "poison", 1, 0.0, 4)
    async with AsyncClient(stack.endpoints) as client:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), every_s)
                return
            answer = Reply(question, client="poison", request_id=f"chaos-poison-{len(answers)}")
            for worker in stack.workers:
                stack.strike(worker)
            answers.append(answer)
            done.append(Done(Action(0.0, "poison", 0, 0.0), time.monotonic(), "worker"))
            try:
                await client.generate([3, 4, 5, stack.poison or 0], max_tokens=4, temperature=0)
            except OctavoError as error:
                answer.error = error.reason


def _compare(report: Findings, calm: Sequence[Reply], poisons: Sequence[Reply]) -> None:
    """Hold every answer against the undisturbed one."""
    expected: Mapping[Question, Reply] = {answer.question: answer for answer in calm}
    for answer in report.answers:
        when = f"{answer.started - report.began:.1f} to {answer.ended - report.began:.1f} s"
        told = f"{answer.request_id} (question {answer.question.number}, {when})"
        if answer.error:
            report.findings.append(f"failed: {told}: {answer.error}")
        elif (wrong := difference(expected[answer.question], answer)) is not None:
            report.wrong += 1
            report.findings.append(f"wrong: {told}: {wrong}")
    report.settings["poisons"] = [answer.error for answer in poisons]
    for answer in poisons:
        if answer.error != "POISON":
            report.findings.append(
                f"{answer.request_id} ended with {answer.error or 'an answer'}, not POISON"
            )


async def _audit(report: Findings, stack: ChaosStack, before: Mapping[str, tuple[int, int]]) -> None:
    """Have every pool verified, and the accounts; see what processes hold."""
    try:
        statuses = await stack.settled(_READY_S if stack.spares else _IDLE_S)
    except StackError as error:
        report.leaked += 1
        report.findings.append(str(error))
        statuses = [status for status in await stack.statuses() if status is not None]
    for status in statuses:
        for told, count in _left(status).items():
            report.leaked += count
            if count:
                report.findings.append(f"scheduler {status.scheduler_id}: {count} {told}")
    for scheduler in stack.schedulers:
        try:
            async with AsyncClient(scheduler.address) as client:
                audits = await client.audit()
        except OctavoError as error:
            report.findings.append(f"{scheduler.name} cannot audit: {error}")
            continue
        for audit in audits:
            if not audit.ok:
                report.leaked += 1
                report.findings.append(f"{audit.worker_id}: {audit.violation or audit.problem}")
    for name, after in stack.resources().items():
        pair = [{"mib": rss / _MIB, "descriptors": fds} for rss, fds in (before.get(name, after), after)]
        report.resources[name] = pair
        if pair[1]["descriptors"] > pair[0]["descriptors"] + _MOST_NEW_DESCRIPTORS:
            report.findings.append(
                f"{name} holds {pair[1]['descriptors']} descriptors, {pair[0]['descriptors']} before"
            )


def _left(status: Status) -> dict[str, int]:
    pools: Any = [worker.pool for worker in status.workers]
    return {
        "blocks not given back": sum(pool.total - pool.free - pool.evictable for pool in pools),
        "requests unaccounted for": abs(
            status.arrivals - sum(status.outcomes.values()) - status.live_requests
        ),
    }
