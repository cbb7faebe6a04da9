"""Steps that take too long, seen by a clock of the test's; and the end of a process, seen from outside."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from worker_svc.engine.watchdog import StepWatch, StuckStep

LIMIT_S, FIRST_LIMIT_S = 10.0, 60.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A watchdog that looks once a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = StepWatch(LIMIT_S, FIRST_LIMIT_S, self.clock)
        self.stuck = StuckStep(self.watch, 1.0)

    def steps(self, count: int, seconds: float, num_seqs: int = 4, prefill: int = 0) -> None:
        for _ in range(count):
            self.watch.begin(num_seqs, prefill)
            self.clock.now += seconds
            self.watch.end()

    def stuck_after(self, num_seqs: int = 4, prefill: int = 0) -> float:
        """Begin a step that never ends; return for how long it is let run."""
        self.watch.begin(num_seqs, prefill)
        began = self.clock.now
        while not self.stuck.look():
            self.clock.now += 1.0
            assert self.clock.now < began + 1e4
        return self.clock.now - began


def test_step_of_a_known_size_has_the_limit_and_the_first_ones_have_more() -> None:
    desk = Desk()
    assert 60 <= desk.stuck_after() <= 62
    desk = Desk()
    desk.steps(3, 0.02)
    assert 10 <= desk.stuck_after() <= 12
    desk = Desk()
    desk.steps(3, 0.02)
    assert 60 <= desk.stuck_after(prefill=4000) <= 62, "a compilation"


def test_steps_that_take_long_are_given_twenty_times_the_longest() -> None:
    desk = Desk()
    desk.steps(5, 3.0)
    assert 60 <= desk.stuck_after() <= 62


def test_no_step_is_stuck_while_nothing_runs_or_steps_follow_each_other() -> None:
    desk = Desk()
    desk.clock.now += 1000.0
    assert not desk.stuck.look()
    for _ in range(300):
        desk.steps(3, 0.1)
        desk.watch.begin(4, 0)
        assert not desk.stuck.look()
        desk.clock.now += 0.5
        desk.watch.end()


def test_process_that_was_stopped_is_given_its_time_again() -> None:
    desk = Desk()
    desk.steps(3, 0.02)
    desk.watch.begin(4, 0)
    assert not desk.stuck.look()
    desk.clock.now += 3600.0
    assert not desk.stuck.look()
    assert desk.stuck.seen_s <= 2.0


STUCK = """
import ctypes, sys, threading
from worker_svc.engine.watchdog import StepWatch, Watchdog
watch = StepWatch(0.2, 0.4)
Watchdog(watch, lambda: print("not serving", flush=True)).start()
watch.begin(1, 0)
{wait}
"""


def ends(wait: str) -> subprocess.CompletedProcess[str]:
    """Return how a process ended whose first step waits like this."""
    program = STUCK.format(wait=wait)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_stuck_step_takes_the_worker_out_of_service_and_ends_the_process() -> None:
    ended = ends("threading.Event().wait()")
    assert (ended.returncode, "not serving" in ended.stdout) == (1, True)
    assert "step_stuck" in ended.stdout + ended.stderr
    assert "Thread" in ended.stderr, "where it stands"


def test_step_that_holds_the_interpreter_ends_the_process_too() -> None:
    ended = ends("ctypes.PyDLL(None).sleep(50)")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Timeout" in ended.stderr
