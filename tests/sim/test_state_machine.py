"""Hypothesis drives a whole system: submit, cancel, stop, time, faults, in any order."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from octavo_lab.sim import FaultInjector, FaultRates, Monitor
from octavo_lab.sim.audit import check_ended
from octavo_lab.sim.cell import SimCell
from octavo_lab.sim.chaos import RandomTraffic, chaos_workers
from octavo_lab.sim.faults import Poison
from octavo_lab.sim.host import LinkTimings

from scheduler_svc.core import CoreConfig, StaticConfig
from scheduler_svc.core.policies import POLICIES
from tests.sim.books import AuditedCore

FAULTS = ("crash", "drop_stream", "hang", "slow", "refuse", "lose_report", "drift", "fail_step", "drain")

configs = st.builds(
    CoreConfig,
    policy=st.sampled_from(list(POLICIES)),
    static=st.sampled_from([None, None, None, StaticConfig(batch_size=3, bucket_bounds=(64,))]),
    window=st.integers(1, 3),
    max_waiting_requests=st.sampled_from([5, 40]),
    max_partial_prefills=st.integers(1, 4),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.05]),
    lookahead=st.integers(0, 8),
    lookahead_age_s=st.sampled_from([0.0, 0.5]),
    aging_stride=st.integers(1, 4),
    max_preemptions=st.integers(0, 3),
    step_watchdog_s=st.just(2.0),
    target_itl_s=st.sampled_from([None, 0.02]),
)


class System(RuleBasedStateMachine):
    """The monitor checks every effect, and all books after each event."""

    @initialize(config=configs, workers=st.integers(1, 4), paged=st.booleans(), seed=st.integers(0, 2**32))
    def start(self, config: CoreConfig, workers: int, paged: bool, seed: int) -> None:
        self.core = AuditedCore(config)
        self.monitor = Monitor(self.core, audit_every=1)
        sizes = [
            replace(worker, paged=paged, prefix_caching=config.prefix_caching)
            for worker in chaos_workers(workers)
        ]
        self.cell = SimCell(self.core, sizes, observers=[self.monitor], timings=LinkTimings(restart_s=0.5))
        self.monitor.hosts = self.cell.hosts
        self.faults = FaultInjector(FaultRates(), random.Random(seed), hang_s=3.0)
        for host in self.cell.hosts.values():
            self.faults.install(host)
        self.traffic = RandomTraffic(random.Random(seed), max_output=60)
        self.sent: list[tuple[str, int]] = []
        self.forced = False

    @rule(count=st.integers(1, 6), poison=st.sampled_from([None, None, None, None, *Poison]))
    def submit(self, count: int, poison: Poison | None) -> None:
        for _ in range(count):
            spec = self.traffic.request(self.cell.loop.now)
            self.sent.append((spec.request_id, spec.sampling.n or 1))
            if poison is not None:
                self.faults.poison[spec.sampling.seed or 0] = poison
            self.cell.submit(spec)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        """A request id that was used: refused while the first lives, fine afterwards."""
        name, _ = data.draw(st.sampled_from(self.sent))
        spec = self.traffic.request(self.cell.loop.now)
        self.cell.submit(replace(spec, request_id=name))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cell.cancel(data.draw(st.sampled_from(self.sent))[0])

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(self.sent))
        request = self.core.find(name)
        if request is not None:
            self.cell.stop_choice(name, data.draw(st.integers(0, len(request.sequences) - 1)))

    @rule(events=st.integers(1, 80))
    def go_on(self, events: int) -> None:
        for _ in range(events):
            if not self.cell.loop.step():
                break

    @rule(name=st.sampled_from(FAULTS), data=st.data())
    def go_wrong(self, name: str, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.cell.hosts)))
        self.forced = True
        self.faults.inject(name, self.cell.hosts[host])

    @rule()
    def tick_early(self) -> None:
        self.cell.perform(self.core.tick(self.cell.loop.now))

    def teardown(self) -> None:
        """Whatever has happened, everything ends and nothing is left."""
        if not hasattr(self, "cell"):
            return
        self.cell.loop.run(stop=lambda: not self.core._lifecycle.requests and self.core.next_wakeup() is None)
        check_ended(self.core, self.cell.hosts)
        self.core.check_ended()


System.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    # No `explain`: it reruns a failure for minutes and says little of a system this large.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSystem = System.TestCase
