"""A process that dies is started again, after a pause that grows, and not for ever."""

from __future__ import annotations

import pytest
from octavo.stack import StackError
from octavo.supervisor import MAX_DEATHS, WITHIN_S, Supervisor


class Process:
    def __init__(self, name: str = "worker-0") -> None:
        self.name = name
        self.alive = True
        self.starts = 0

    def start(self) -> None:
        self.alive = True
        self.starts += 1

    def account(self) -> str:
        return f"{self.name} was killed by SIGKILL"

    def last_lines(self) -> str:
        return "the last words"


def dies(process: Process, supervisor: Supervisor, now: float) -> float:
    """Let it die; return when it runs again."""
    process.alive = False
    while not process.alive:
        supervisor.poll(now)
        now += 0.05
    return now


def test_dead_process_is_started_again_after_a_pause_and_said_so() -> None:
    process, other, said = Process(), Process("scheduler"), list[str]()
    supervisor = Supervisor([process, other], said.append)

    process.alive = False
    supervisor.poll(10.0)
    assert process.starts == 0
    supervisor.poll(10.2)
    assert process.starts == 0
    supervisor.poll(10.3)
    assert (process.starts, other.starts) == (1, 0)
    assert said == ["worker-0 was killed by SIGKILL; starting it again in 0.25 s"]


def test_pause_doubles_with_each_death_within_a_minute() -> None:
    process, said = Process(), list[str]()
    supervisor = Supervisor([process], said.append)

    now = 0.0
    for _ in range(MAX_DEATHS - 1):
        now = dies(process, supervisor, now)

    assert [line.rpartition(" in ")[2] for line in said] == ["0.25 s", "0.5 s", "1 s", "2 s"]


def test_fifth_death_within_a_minute_is_the_last_and_tells_the_end_of_the_log() -> None:
    process = Process()
    supervisor = Supervisor([process], lambda _: None)
    now = 0.0
    for _ in range(MAX_DEATHS - 1):
        now = dies(process, supervisor, now)

    process.alive = False
    with pytest.raises(StackError, match="died 5 times within a minute") as raised:
        supervisor.poll(now)
    assert raised.value.log == "the last words"


def test_deaths_that_are_spread_out_never_end_it() -> None:
    process = Process()
    supervisor = Supervisor([process], lambda _: None)

    for number in range(3 * MAX_DEATHS):
        dies(process, supervisor, number * WITHIN_S / (MAX_DEATHS - 2))

    assert process.starts == 3 * MAX_DEATHS
