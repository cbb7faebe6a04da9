"""Workers that are taken away again and again, and requests that kill them: who is blamed, and how soon."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes
from octavo_lab.sim import Monitor, SimCell, SimWorkerConfig
from octavo_lab.sim.faults import FaultInjector, FaultRates, Poison
from octavo_lab.sim.host import LinkTimings

from scheduler_svc.core import (
    CoreConfig,
    Effect,
    EmitTokens,
    FinishChoice,
    LogEvent,
    NewRequest,
    Reject,
    SchedulerCore,
)
from scheduler_svc.core.errors import Reason
from scheduler_svc.core.overload import Level, OverloadConfig

RESTART_S = 3.0


@dataclass(slots=True)
class Watch:
    """What clients see: how each request ended, and how long it stood still after a loss."""

    ends: dict[str, Reason | None] = field(default_factory=dict)
    deaths: int = 0
    pauses: list[float] = field(default_factory=list)
    lost_at: dict[str, float] = field(default_factory=dict)
    level: int = Level.NORMAL
    """The highest level of the ladder."""
    running: set[str] = field(default_factory=set)
    last_at: dict[str, float] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    """Between two tokens of any request."""
    core: SchedulerCore | None = None

    def submitted(self, spec: NewRequest, now: float) -> None:
        pass

    def effects(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    self.running.add(delta.request_id)
                    self.longest_gap_s = max(
                        self.longest_gap_s, now - self.last_at.get(delta.request_id, now)
                    )
                    self.last_at[delta.request_id] = now
                    lost_at = self.lost_at.pop(delta.request_id, None)
                    if lost_at is not None:
                        self.pauses.append(now - lost_at)
            elif isinstance(effect, Reject | FinishChoice):
                self.ends[effect.request_id] = effect.error.reason if effect.error is not None else None
                self.running.discard(effect.request_id)
                self.lost_at.pop(effect.request_id, None)
            elif isinstance(effect, LogEvent) and effect.name == "level_changed":
                self.level = max(self.level, int(str(effect.fields["new_level"])))
            elif isinstance(effect, LogEvent) and effect.name == "worker_lost":
                self.deaths += 1
                assert self.core is not None
                for request_id in self.running:
                    request = self.core.find(request_id)
                    if request is not None and request.sequences[0].binding.worker_id is None:
                        self.lost_at.setdefault(request_id, now)


class Fleet:
    """Simulated workers that come back after a while."""

    def __init__(
        self,
        num_workers: int,
        max_num_seqs: int = 32,
        restart_s: float = RESTART_S,
        overload: OverloadConfig | None = None,
    ) -> None:
        times = StepTimes.builtin()
        workers = [
            SimWorkerConfig(
                worker_id=f"w{index}",
                step_times=times,
                num_blocks=4096,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=512,
                max_model_len=2048,
            )
            for index in range(num_workers)
        ]
        self.core = SchedulerCore(CoreConfig(max_waiting_requests=100_000, overload=overload))
        self.watch = Watch(core=self.core)
        self.monitor = Monitor(self.core, audit_every=1000)
        timings = LinkTimings(restart_s=restart_s)
        self.cell = SimCell(self.core, workers, observers=[self.monitor, self.watch], timings=timings)
        self.monitor.hosts = self.cell.hosts
        self.faults = FaultInjector(FaultRates(), random.Random(1))
        for host in self.cell.hosts.values():
            self.faults.install(host)

    def submit(self, seed: int, prompt_len: int = 60, max_tokens: int = 100) -> None:
        """Submit a request now."""
        sampling = SamplingParams(seed=seed, max_tokens=max_tokens)
        tokens = [seed % 1000 + i for i in range(prompt_len)]
        spec = NewRequest(request_id=f"r{seed}", model="sim", prompt_token_ids=tokens, sampling=sampling)
        self.cell.submit(spec)

    def kill_every(self, seconds: float, seed: int = 0) -> None:
        """Kill a worker that is up, any one, again and again while anything lives."""
        rng = random.Random(seed)

        def kill() -> None:
            up = [host for host in self.cell.hosts.values() if host.session]
            if up:
                rng.choice(up).crash()
            self.cell.loop.after(rng.uniform(0.5, 1.5) * seconds, kill)

        self.cell.loop.after(seconds, kill)

    def run(self, count: int) -> None:
        """Run until so many requests have ended."""
        self.cell.loop.run(stop=lambda: len(self.watch.ends) == count)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize(("num_workers", "gap_s"), [(1, 2.0), (2, 0.8), (4, 0.2)])
def test_innocents_outlive_workers_that_are_killed_every_two_seconds(num_workers: int, gap_s: float) -> None:
    fleet = Fleet(num_workers)
    rng = random.Random(5)
    at, count = 0.0, 400
    for seed in range(1, count + 1):
        at += rng.expovariate(1 / gap_s)
        sizes = (rng.randint(10, 200), rng.randint(10, 200))
        fleet.cell.loop.at(at, lambda seed=seed, sizes=sizes: fleet.submit(seed, *sizes))  # type: ignore[misc]
    fleet.kill_every(2.0)
    fleet.run(count)
    assert fleet.watch.deaths > 35
    assert set(fleet.watch.ends.values()) == {None}
    assert quantile(fleet.watch.pauses, 0.5) < RESTART_S + 0.5
    if num_workers > 1:
        assert quantile(fleet.watch.pauses, 0.99) < 3 * RESTART_S


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("culprit", [3, 20, 41])
def test_poison_among_innocents_ends_after_four_deaths_at_most_and_alone(
    num_workers: int, culprit: int
) -> None:
    fleet = Fleet(num_workers)
    for seed in range(1, 42):
        fleet.submit(seed)
    fleet.cell.loop.run(until=0.5)
    fleet.faults.poison[culprit] = Poison.KILLS
    fleet.run(41)
    assert {name for name, reason in fleet.watch.ends.items() if reason} == {f"r{culprit}"}
    assert fleet.watch.ends[f"r{culprit}"] is Reason.POISON
    assert fleet.watch.deaths <= 4


def test_poison_is_found_while_workers_are_killed_for_other_reasons() -> None:
    fleet = Fleet(4)
    for seed in range(1, 200):
        fleet.cell.loop.at(0.2 * seed, lambda seed=seed: fleet.submit(seed))  # type: ignore[misc]
    poison = dict.fromkeys(range(25, 200, 50), Poison.KILLS)
    fleet.faults.poison.update(poison)
    fleet.kill_every(4.0)
    fleet.run(199)
    failed = {name: reason for name, reason in fleet.watch.ends.items() if reason}
    assert failed == {f"r{seed}": Reason.POISON for seed in poison}
    assert fleet.faults.counts["killed"] <= 8 * len(poison)


def test_suspects_of_one_loss_are_tried_together() -> None:
    fleet = Fleet(1, max_num_seqs=256, restart_s=0.1)
    for seed in range(1, 175):
        fleet.submit(seed, max_tokens=200)
    fleet.cell.loop.run(until=2.0)
    fleet.cell.hosts["w0"].crash()
    paused = set(fleet.watch.lost_at)
    assert len(paused) > 80
    fleet.cell.loop.run(stop=lambda: not fleet.watch.lost_at)
    assert max(fleet.watch.pauses) < 3.0, "one by one it took 11 s; what they had computed takes 1.7 s again"


@pytest.mark.parametrize(("kill_every_s", "restart_s"), [(2.0, 2.0), (2.0, 4.0), (4.0, 20.0)])
def test_absence_of_workers_is_no_load(kill_every_s: float, restart_s: float) -> None:
    fleet = Fleet(2, restart_s=restart_s, overload=OverloadConfig())
    for seed in range(1, 101):
        fleet.cell.loop.at(0.6 * seed, lambda seed=seed: fleet.submit(seed))  # type: ignore[misc]
    fleet.kill_every(kill_every_s)
    fleet.run(100)
    assert fleet.watch.deaths > 5
    assert set(fleet.watch.ends.values()) == {None}
    assert fleet.watch.level == Level.NORMAL


def test_losses_of_a_worker_that_was_to_go_are_no_evidence() -> None:
    fleet = Fleet(1)
    fleet.submit(1, max_tokens=400)
    (host,) = fleet.cell.hosts.values()
    for _, cut in zip(range(8), itertools.count(1), strict=False):
        fleet.cell.loop.run(until=cut * 4.0)
        fleet.cell.perform(fleet.core.worker_draining("w0", fleet.cell.loop.now))
        host.crash()
        request = fleet.core.find("r1")
        assert request is None or request.sequences[0].deaths.count == 0
    fleet.run(1)
    assert fleet.watch.ends == {"r1": None}


def test_rolling_restart_under_load_fails_nobody_and_hardly_pauses() -> None:
    fleet = Fleet(3)
    for seed in range(1, 41):
        fleet.cell.loop.at(0.05 * seed, lambda seed=seed: fleet.submit(seed, 60, 1900))  # type: ignore[misc]
    for number, host in enumerate(fleet.cell.hosts.values()):
        fleet.cell.loop.run(until=4.0 + 17.0 * number)
        assert host.machine.num_seqs >= 8
        was = host.session
        host.drain()
        fleet.cell.loop.run(until=4.0 + 17.0 * number + 16.0)
        assert host.session != was, "it is empty soon after the grace, and restarts"
    fleet.run(40)
    assert set(fleet.watch.ends.values()) == {None}
    assert fleet.watch.longest_gap_s < 1.5, "a thousand tokens take a second to prefill again"
