"""A busy system in which everything goes wrong: random requests on random workers with random faults."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.protocol.keys import chain
from octavo.protocol.steps import KEY_BYTES, Priority
from octavo.sampling import SamplingParams
from octavo.steptimes import StepTimes

from octavo_lab.sim.arrivals import poisson
from octavo_lab.sim.audit import check_ended
from octavo_lab.sim.cell import SimCell
from octavo_lab.sim.faults import FaultInjector, FaultRates, Poison
from octavo_lab.sim.host import LinkTimings, StepMachine
from octavo_lab.sim.monitor import Monitor
from octavo_lab.sim.tokens import stream_of, token_at
from octavo_lab.sim.worker import MODEL, SimWorker, SimWorkerConfig
from scheduler_svc.core import CoreConfig, Effect, FinishChoice, NewRequest, Reject, SchedulerCore
from scheduler_svc.core.errors import Reason

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
CHAOS = FaultRates(
    crash=1e-4,
    drop_stream=2e-4,
    hang=2e-5,
    slow=2e-4,
    refuse=1e-3,
    lose_report=1e-4,
    drift=1e-4,
    fail_step=5e-4,
    drain=1e-4,
)
CHAOS_CONFIG = CoreConfig(step_watchdog_s=2.0, max_waiting_requests=40)


@dataclass(slots=True)
class RandomTraffic:
    """Makes up requests of every kind; the same seed makes the same ones."""

    rng: random.Random
    max_output: int = 120
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    """Openings that prompts share."""
    count: int = 0

    def __post_init__(self) -> None:
        self.prefixes.extend(self._tokens(length) for length in (16, 48, 100, 200))

    def request(self, now: float) -> NewRequest:
        """Return a new request."""
        rng = self.rng
        self.count += 1
        seed = self.count
        opening = rng.choice(self.prefixes) if rng.random() < 0.5 else ()
        longest = 400 if rng.random() < 0.1 else 66
        prompt = (*opening, *self._tokens(rng.randint(1, longest)))
        n = rng.randint(2, 4) if rng.random() < 0.15 else 1
        most = rng.randint(1, self.max_output)
        stops: tuple[int, ...] = ()
        if rng.random() < 0.5:
            # A token that comes up on the way, as an end-of-sequence token does.
            stops = (token_at(stream_of(seed, 0), len(prompt) + rng.randrange(most)),)
        root = bytes(KEY_BYTES)
        return NewRequest(
            request_id=f"r{seed}",
            model=MODEL,
            prompt_token_ids=prompt,
            sampling=SamplingParams(n=n, seed=seed, max_tokens=most, stop_token_ids=stops),
            priority=rng.choice(list(Priority)),
            tenant=rng.choice("abc"),
            prompt_keys=tuple(chain(root, prompt, BLOCK_SIZE)),
            root_key=root,
            queue_deadline=self._deadline(now, 0.3, 5.0),
            ttft_deadline=self._deadline(now, 0.1, 8.0),
            deadline=self._deadline(now, 0.2, 20.0),
            resumed=self._resumed(seed, n, len(prompt), most),
            paced=rng.random() < 0.1,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1000) for _ in range(count))

    def _deadline(self, now: float, low: float, high: float) -> float | None:
        return None if self.rng.random() < 0.7 else now + self.rng.uniform(low, high)

    def _resumed(self, seed: int, n: int, prompt_len: int, most: int) -> dict[int, tuple[int, ...]]:
        if most < 2 or self.rng.random() > 0.05:
            return {}
        ends = [prompt_len + self.rng.randrange(most) for _ in range(n)]
        return {
            choice: tuple(token_at(stream_of(seed, choice), at) for at in range(prompt_len, end))
            for choice, end in enumerate(ends)
        }


def chaos_workers(count: int) -> list[SimWorkerConfig]:
    """Return workers of different sizes, the first large enough for every request."""
    times = StepTimes.builtin()
    sizes = [(160, 16, 256), (96, 8, 128), (80, 24, 512), (70, 4, 64)]
    return [
        SimWorkerConfig(
            worker_id=f"w{index}",
            step_times=times,
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=min(MAX_MODEL_LEN, blocks * BLOCK_SIZE),
        )
        for index, (blocks, seqs, budget) in enumerate(itertools.islice(itertools.cycle(sizes), count))
    ]


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """What came of a run."""

    steps: int
    virtual_s: float
    cpu_s: float
    mean_running: float
    """Sequences on workers, averaged over steps."""
    requests: int
    tokens: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    innocents: int
    """Requests that were failed although nothing was wrong with them."""
    surprises: dict[str, int]
    """What plans met on the workers that good books rule out; see `SimWorker.surprises`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSetting:
    """How busy, how faulty, on what."""

    workers: Sequence[SimWorkerConfig] = field(default_factory=lambda: chaos_workers(4))
    machine: Callable[[SimWorkerConfig], StepMachine] = SimWorker
    rates: FaultRates = CHAOS
    rate_per_s: float = 12.0
    audit_every: int = 64
    """Events between two looks into the core."""


class Chaos:
    """Keeps a system busy until so many steps have run, then lets everything end.

    Raises InvariantError when the core breaks a promise.
    """

    def __init__(
        self, core: SchedulerCore | None = None, setting: ChaosSetting | None = None, *, seed: int = 0
    ) -> None:
        setting = setting or ChaosSetting()
        self.rng = random.Random(seed)
        self.core = core or SchedulerCore(CHAOS_CONFIG)
        self.monitor = Monitor(self.core, setting.audit_every)
        self.traffic = RandomTraffic(random.Random(seed + 1))
        self.faults = FaultInjector(setting.rates, random.Random(seed + 2), hang_s=3.0)
        self.live: dict[str, NewRequest] = {}
        self.innocents = 0
        self.steps = 0
        self._running_sum = 0
        self._arrivals = poisson(setting.rate_per_s, random.Random(seed + 3))
        self.cell = SimCell(
            self.core,
            setting.workers,
            observers=[self.monitor, self],
            timings=LinkTimings(restart_s=1.0),
            machine=setting.machine,
        )
        self.monitor.hosts = self.cell.hosts
        for host in self.cell.hosts.values():
            self.faults.install(host)
            host.before_step = self._before_step

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        self.live[spec.request_id] = spec

    def effects(self, effects: list[Effect], now: float) -> None:
        """Keep track of what is live, and of who is failed for the fault of others."""
        for effect in effects:
            if not isinstance(effect, Reject | FinishChoice):
                continue
            if effect.error is not None and effect.error.reason in {Reason.POISON, Reason.STEP_FAILED}:
                self.innocents += self.live[effect.request_id].sampling.seed not in self.faults.poison
            if isinstance(effect, Reject) or effect.last:
                self.live.pop(effect.request_id, None)

    def run(self, steps: int) -> ChaosResult:
        """Run about so many steps, then until everything has ended."""
        began = time.process_time()
        self.cell.loop.after(0.0, self._arrive)
        self._goal = steps
        self.cell.loop.run(stop=lambda: self.steps >= steps)
        self.cell.loop.run(stop=lambda: not self.live and self.core.next_wakeup() is None)
        check_ended(self.core, self.cell.hosts)
        snapshot = self.core.snapshot(self.cell.loop.now)
        surprises: Counter[str] = Counter()
        for host in self.cell.hosts.values():
            if isinstance(host.machine, SimWorker):
                surprises += host.machine.surprises
        return ChaosResult(
            steps=self.steps,
            virtual_s=self.cell.loop.now,
            cpu_s=time.process_time() - began,
            mean_running=self._running_sum / max(1, self.steps),
            requests=snapshot.arrivals,
            tokens=self.monitor.num_tokens,
            outcomes={str(reason): count for reason, count in snapshot.outcomes.items()},
            faults=dict(self.faults.counts),
            innocents=self.innocents,
            surprises=dict(surprises),
        )

    def _before_step(self, host: object) -> None:
        self.steps += 1
        self._running_sum += sum(h.machine.num_seqs for h in self.cell.hosts.values())
        self.faults.before_step(host)  # type: ignore[arg-type]

    def _arrive(self) -> None:
        if self.steps >= self._goal:
            return
        now, rng = self.cell.loop.now, self.rng
        self.cell.submit(self.traffic.request(now))
        draw = rng.random()
        if draw < 0.02:
            self.faults.poison[self.traffic.count + 1] = rng.choice(list(Poison))
        elif draw < 0.10 and self.live:
            self.cell.cancel(rng.choice(list(self.live)))
        elif draw < 0.15 and self.live:
            spec = self.live[rng.choice(list(self.live))]
            self.cell.stop_choice(spec.request_id, rng.randrange(spec.sampling.n or 1))
        self.cell.loop.at(next(self._arrivals), self._arrive)
