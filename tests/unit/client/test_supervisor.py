"""A process that dies is started again, after a pause that grows, however often it dies."""

from __future__ import annotations

from octavo.supervisor import SETTLED_S, SHOWN_EVERY, Supervisor


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


def test_pause_doubles_while_it_dies_soon_after_its_start() -> None:
    process, said = Process(), list[str]()
    supervisor = Supervisor([process], said.append)

    now = 0.0
    for _ in range(6):
        now = dies(process, supervisor, now)

    pauses = [line.rpartition(" in ")[2] for line in said if "starting it again" in line]
    assert pauses == ["0.25 s", "0.5 s", "1 s", "2 s", "4 s", "4 s"]


def test_end_of_the_log_is_shown_of_a_process_that_does_not_come_up() -> None:
    process, said = Process(), list[str]()
    supervisor = Supervisor([process], said.append)

    now = 0.0
    for _ in range(2 * SHOWN_EVERY):
        now = dies(process, supervisor, now)

    assert process.starts == 2 * SHOWN_EVERY
    shown = [line for line in said if "the last words" in line]
    assert [line.partition(";")[0] for line in shown] == [
        "worker-0 died 5 times in a row",
        "worker-0 died 10 times in a row",
    ]


def test_death_after_it_had_settled_is_a_new_trouble() -> None:
    process, said = Process(), list[str]()
    supervisor = Supervisor([process], said.append)

    now = 0.0
    for _ in range(3 * SHOWN_EVERY):
        now = dies(process, supervisor, now) + SETTLED_S

    assert process.starts == 3 * SHOWN_EVERY
    assert all(line.endswith("in 0.25 s") for line in said)
