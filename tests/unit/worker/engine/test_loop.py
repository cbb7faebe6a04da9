"""The engine's thread, over an engine whose steps the test holds and lets go."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
from octavo.protocol.steps import Geometry, Plan, PoolReport, Report, StepStatus

from worker_svc.engine.limits import Limit, Limits
from worker_svc.engine.loop import EngineLoop, Loaded, StepEngine
from worker_svc.kv.memory import PinOutcome
from worker_svc.runner.sim import built_in_model

WAIT_S = 60.0


class HeldEngine(StepEngine):
    """Notes what it is asked to do; a step begins at once and ends when the test allows it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.live = 0
        self.broken = False

    @property
    def num_live(self) -> int:
        return self.live

    def run_step(self, plan: Plan, clock: Callable[[], float]) -> Report:
        self.started.release()
        assert self.allowed.acquire(timeout=WAIT_S)
        if self.broken:
            raise RuntimeError("books do not balance")
        self.done.append(f"step {plan.step}")
        return Report(plan.step, StepStatus.OK, self.pool_report(), self.live, 0)

    def cancel(self, handles: Iterable[int]) -> None:
        self.done.append(f"cancel {list(handles)}")

    def pin(self, name: str, keys: tuple[bytes, ...]) -> PinOutcome:
        self.done.append(f"pin {name}")
        return PinOutcome(accepted=True, wanted_blocks=len(keys), held_blocks=0)

    def unpin(self, name: str) -> int:
        self.done.append(f"unpin {name}")
        return 0

    def drop_all(self) -> None:
        self.done.append("drop")

    def take_cached_keys(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        return (), ()

    def pool_report(self) -> PoolReport:
        return PoolReport(1, 0, 0)

    def check_integrity(self) -> None:
        if self.broken:
            raise KeyError("lost")


def loaded(engine: StepEngine) -> Loaded:
    return Loaded(engine, built_in_model(), Geometry(16, 1), 16, Limits(Limit(1), Limit(16)))


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
async def loop(engine: HeldEngine) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(lambda: loaded(engine))
    loop.start()
    await loop.ready
    yield loop
    engine.allowed.release(100)
    assert loop.stop(WAIT_S)


@pytest.fixture
def reports() -> asyncio.Queue[Report]:
    return asyncio.Queue()


async def steps_of(reports: asyncio.Queue[Report], count: int) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [(await reports.get()).step for _ in range(count)]


async def test_plans_run_in_order_and_are_reported_on_the_event_loop(
    loop: EngineLoop, engine: HeldEngine, reports: asyncio.Queue[Report]
) -> None:
    threads: set[int] = set()

    def deliver(report: Report) -> None:
        threads.add(threading.get_ident())
        reports.put_nowait(report)

    engine.allowed.release(3)
    for step in (1, 2, 3):
        loop.submit(Plan(step), deliver)
    assert await steps_of(reports, 3) == [1, 2, 3]
    assert threads == {threading.get_ident()}


async def test_queued_plan_starts_while_the_event_loop_is_busy(
    loop: EngineLoop, engine: HeldEngine, reports: asyncio.Queue[Report]
) -> None:
    engine.allowed.release(1)
    loop.submit(Plan(1), reports.put_nowait)
    loop.submit(Plan(2), reports.put_nowait)
    # Nothing is awaited from here on: the event loop cannot run.
    assert engine.started.acquire(timeout=WAIT_S)
    assert engine.started.acquire(timeout=WAIT_S)
    assert engine.done == ["step 1"]
    assert reports.empty()


async def test_call_overtakes_queued_plans_but_not_the_running_step(
    loop: EngineLoop, engine: HeldEngine, reports: asyncio.Queue[Report]
) -> None:
    loop.submit(Plan(1), reports.put_nowait)
    loop.submit(Plan(2), reports.put_nowait)
    assert engine.started.acquire(timeout=WAIT_S)
    cancelled = loop.call(lambda engine: engine.cancel((7,)))
    engine.allowed.release(2)
    await cancelled
    assert await steps_of(reports, 2) == [1, 2]
    assert engine.done == ["step 1", "cancel [7]", "step 2"]


async def test_discarded_plans_never_start(
    loop: EngineLoop, engine: HeldEngine, reports: asyncio.Queue[Report]
) -> None:
    for step in (1, 2, 3):
        loop.submit(Plan(step), reports.put_nowait)
    assert engine.started.acquire(timeout=WAIT_S)
    loop.discard_plans()
    engine.allowed.release(3)
    await loop.call(lambda engine: engine.drop_all())
    assert engine.done == ["step 1", "drop"]


@pytest.mark.parametrize(("live", "bubble_us"), [(1, 1_000_000), (0, 0)])
async def test_bubble_counts_the_wait_only_while_sequences_live(
    engine: HeldEngine, reports: asyncio.Queue[Report], live: int, bubble_us: int
) -> None:
    ticks = itertools.count()
    loop = EngineLoop(lambda: loaded(engine), clock=lambda: float(next(ticks)))
    loop.start()
    await loop.ready
    engine.live = live
    engine.allowed.release(2)
    waits = []
    for step in (1, 2):
        loop.submit(Plan(step), reports.put_nowait)
        waits.append((await reports.get()).timing.bubble_us)
    assert waits == [0, bubble_us]
    assert loop.stop(WAIT_S)


async def test_engine_that_raises_ends_the_thread_with_its_error(engine: HeldEngine) -> None:
    loop = EngineLoop(lambda: loaded(engine))
    loop.start()
    await loop.ready
    engine.broken = True
    engine.allowed.release(1)
    loop.submit(Plan(1), lambda _: None)
    with pytest.raises(RuntimeError, match="do not balance"):
        await loop.ended
    assert loop.stop(WAIT_S)


async def test_build_that_fails_ends_the_thread_with_its_error() -> None:
    def build() -> Loaded:
        raise MemoryError("too big")

    loop = EngineLoop(build)
    loop.start()
    with pytest.raises(MemoryError, match="too big"):
        await loop.ended
    assert not loop.ready.done()
    assert loop.stop(WAIT_S)


async def test_stop_during_a_hanging_step_gives_up_in_time(loop: EngineLoop, engine: HeldEngine) -> None:
    loop.submit(Plan(1), lambda _: None)
    assert engine.started.acquire(timeout=WAIT_S)
    assert not loop.stop(0.01)
