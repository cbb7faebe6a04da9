"""The degradation ladder on a virtual clock: what leads up, what leads down, and what never flaps."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.steptimes import StepTimes
from octavo_lab.sim import SimCell, SimWorkerConfig, request_of
from octavo_lab.traces import TraceRequest

from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.overload import Controller, Level, Misses, OverloadConfig, Pressure, Transition

CONFIG = OverloadConfig()


class Clock:
    """A controller that looks every tenth of a second."""

    def __init__(self, config: OverloadConfig = CONFIG) -> None:
        self.controller = Controller(config)
        self.now = 0.0
        self.changes: list[tuple[float, Transition]] = []

    def hold(self, pressure: Pressure, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now = round(self.now + 0.1, 6)
            change = self.controller.observe(pressure, self.now)
            if change is not None:
                self.changes.append((self.now, change))

    @property
    def levels(self) -> list[int]:
        return [int(change.level) for _, change in self.changes if change.former is not change.level]


def backlog(share: float) -> Pressure:
    """The same share in each class."""
    return Pressure(backlog=(share, share, share))


CALM = Pressure()


def test_each_level_is_entered_and_left_in_turn_as_the_backlog_grows_and_drains() -> None:
    clock = Clock()
    for share in (0.4, 0.55, 0.75, 0.9, 0.97):
        clock.hold(backlog(share), 2.0)
    assert clock.levels == [1, 2, 3, 4]
    for share in (0.6, 0.5, 0.4, 0.3):
        clock.hold(backlog(share), 6.0)
    assert clock.levels == [1, 2, 3, 4, 3, 2, 1, 0]
    causes = [change.cause for _, change in clock.changes]
    assert causes == ["backlog"] * 4 + ["half_open", *["calm"] * 4]


@pytest.mark.parametrize(
    ("pressure", "level", "cause"),
    [
        (Pressure(backlog=(0.0, 0.0, 1.0)), 2, "backlog"),
        (Pressure(backlog=(0.0, 1.0, 1.0)), 3, "backlog"),
        (Pressure(backlog=(1.0, 1.0, 1.0)), 4, "backlog"),
        (Pressure(wait=(0.0, 1.0)), 2, "wait"),
        (Pressure(wait=(1.0, 1.0)), 3, "wait"),
        (Pressure(blocks=1.0), 1, "blocks"),
        (Pressure(misses=0.6), 3, "misses"),
        (Pressure(misses=0.9), 4, "misses"),
        (Pressure(stalled_s=10.0), 4, "stalled"),
        (Pressure(backlog=(0.0, 0.0, 0.6), wait=(0.0, 0.6)), 1, "backlog+wait"),
    ],
)
def test_input_leads_to_the_level_that_relieves_it_and_no_further(
    pressure: Pressure, level: int, cause: str
) -> None:
    clock = Clock()
    clock.hold(pressure, 5.0)
    assert clock.controller.level == level
    assert clock.changes[0][1].cause == cause


def test_input_around_a_threshold_does_not_make_the_level_flap() -> None:
    for level, threshold in enumerate((0.5, 0.7, 0.85, 0.95), 1):
        clock, rng = Clock(), random.Random(level)
        for _ in range(600):
            clock.hold(backlog(threshold * rng.uniform(0.9, 1.1)), 0.1)
        ups = [change for _, change in clock.changes if change.level > change.former]
        assert clock.levels == sorted(clock.levels), "a level was left while its input was near"
        assert len(ups) >= level


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1.2), st.floats(0, 1.2), st.floats(0, 1), st.floats(0, 20), st.integers(1, 30)
        ),
        max_size=40,
    )
)
def test_levels_change_one_at_a_time_and_each_is_kept_for_its_least_time(
    phases: list[tuple[float, float, float, float, int]],
) -> None:
    clock = Clock()
    for share, wait, misses, stalled_s, tenths in phases:
        pressure = Pressure((share, share, share), (wait, wait), 0.0, misses, stalled_s)
        clock.hold(pressure, tenths / 10)
    since, level = -math.inf, 0
    for at, change in clock.changes:
        assert change.former == level
        assert abs(change.level - change.former) <= 1
        if change.level > level:
            assert at - since >= CONFIG.rise_s - 1e-6
        elif change.level < level and change.cause == "calm":
            assert at - since >= CONFIG.dwell_s - 1e-6
        if change.level != level:
            since, level = at, change.level
    clock.hold(CALM, 60.0)
    assert clock.controller.level is Level.NORMAL


def test_caps_of_what_may_be_trimmed_fall_as_the_backlog_grows() -> None:
    clock = Clock()
    assert clock.controller.caps() is None
    prompts, outputs = [], []
    for share in (0.5, 0.6, 0.8, 1.0, 1.5):
        clock.hold(backlog(share), 1.0)
        caps = clock.controller.caps()
        assert caps is not None
        prompts.append(caps.prompt_tokens)
        outputs.append(caps.max_tokens)
    assert prompts == sorted(prompts, reverse=True)
    assert (prompts[0], prompts[-1], outputs[0], outputs[-1]) == (2048, 256, 512, 64)
    assert len(set(prompts)) == 4


def opened() -> Clock:
    clock = Clock()
    clock.hold(backlog(1.0), 1.0)
    assert clock.controller.level is Level.OPEN
    return clock


def test_breaker_admits_nobody_while_open_and_closes_when_its_probes_have_their_tokens() -> None:
    clock = opened()
    breaker = clock.controller.breaker
    assert not breaker.admits()
    clock.hold(backlog(0.3), 1.2)
    assert clock.changes[-1][1].cause == "half_open"
    for name in ("a", "b", "c"):
        assert breaker.admits()
        breaker.probes.add(name)
    assert not breaker.admits()
    for name in ("a", "b", "c"):
        assert clock.controller.level is Level.OPEN
        breaker.passed(name)
    clock.hold(backlog(0.3), 0.1)
    assert (clock.controller.level, clock.changes[-1][1].cause) == (Level.SHED_STANDARD, "probes")


def test_breaker_stays_open_twice_as_long_each_time_that_a_probe_fails() -> None:
    clock = opened()
    breaker = clock.controller.breaker
    waits = []
    for _ in range(7):
        clock.hold(CALM, 0.1)
        began = clock.now
        while not breaker.half_open:
            clock.hold(CALM, 0.1)
        waits.append(clock.now - began)
        breaker.probes.add("probe")
        change = clock.controller.probe_failed("probe", clock.now)
        assert change is not None
        assert change.cause == "probe_failed"
        assert not breaker.admits()
    assert waits[1:] == pytest.approx([2, 4, 8, 16, 30, 30], abs=0.3)


def test_breaker_without_anybody_to_probe_closes_when_it_is_calm() -> None:
    clock = opened()
    clock.hold(CALM, 10.0)
    assert clock.levels[-4:] == [3, 2, 1, 0]


def test_probe_that_its_client_gave_up_says_nothing_and_another_takes_its_place() -> None:
    clock = opened()
    clock.hold(CALM, 1.2)
    breaker = clock.controller.breaker
    for name in ("a", "b", "c"):
        breaker.probes.add(name)
    breaker.withdrawn("b")
    assert breaker.admits()
    assert clock.controller.probe_failed("b", clock.now) is None


def test_misses_say_nothing_before_there_are_some_and_are_forgotten() -> None:
    misses = Misses()
    for _ in range(9):
        misses.add(0.0, missed=True)
    assert misses.share(0.0) == 0.0
    for _ in range(9):
        misses.add(0.0, missed=False)
    assert misses.share(0.0) == pytest.approx(0.5)
    assert misses.share(60.0) == 0.0


@pytest.mark.parametrize(
    "changes", [{"backlog": (0.5, 0.4, 0.85, 0.95)}, {"wait": (0.0, None, None, None)}, {"exit_ratio": 1.0}]
)
def test_thresholds_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(CONFIG, **changes)  # type: ignore[arg-type]  # any field


def test_pressure_is_none_once_nothing_goes_on_and_then_nobody_looks() -> None:
    core = SchedulerCore(CoreConfig(max_waiting_requests=30, overload=OverloadConfig()))
    cell = SimCell(core, [SimWorkerConfig(worker_id="w0", step_times=StepTimes.builtin(), max_num_seqs=2)])
    for index in range(12):
        cell.submit_at(1.0, request_of(TraceRequest(0.0, 50, 20), f"r{index}", seed=index))
    cell.loop.run(until=1.2)
    assert core.snapshot(1.2).overload[0].pressure.backlog[2] > 0

    cell.loop.run(until=60.0)

    pressure = core.snapshot(60.0).overload[0].pressure
    assert (pressure.backlog, pressure.blocks, pressure.misses, pressure.stalled_s) == ((0, 0, 0), 0, 0, 0)
    assert core.next_wakeup() is None
