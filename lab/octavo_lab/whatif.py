"""`octavo bench whatif`: how much sooner a request would have begun without a tenant, or by another policy.

The requests of a plan log come at the same times to simulated workers like those of the log, whose steps take
what the scheduler had learned of them. Once as it was, once changed: so what differs is the change.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from octavo.cli import output
from octavo.steptimes import StepTimes
from octavo.v1.planlog_pb2 import PlanLogEntry

from octavo_lab.command import BenchError
from octavo_lab.sim import SimCell, SimWorkerConfig
from scheduler_svc.core import (
    ChoiceTimings,
    CoreConfig,
    Effect,
    FinishChoice,
    NewRequest,
    SchedulerCore,
    WorkerInfo,
)
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.steptime import ENOUGH_STEPS, Prices
from scheduler_svc.planlog import PlanLogError, replay, replayed_requests
from scheduler_svc.planlog.convert import worker_from_proto
from scheduler_svc.planlog.finding import find_request

_START_S: Final = 1.0
"""When the first request comes: all workers have attached by then."""
_MOST_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Past:
    """What a plan log has of workers and requests."""

    config: CoreConfig
    workers: tuple[SimWorkerConfig, ...]
    requests: tuple[tuple[float, NewRequest], ...]
    ends: dict[str, ChoiceTimings]
    """How it went then, by request."""


class _Watch:
    """Watches a replay, or a simulation, for how requests went and which workers there were."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self.prices: dict[str, Prices] = {}
        self.ends: dict[str, ChoiceTimings] = {}

    def passed_over(self) -> None:
        """Nothing is asked of the core."""

    def before(self, core: SchedulerCore, entry: PlanLogEntry) -> None:
        """Note a worker."""
        if entry.WhichOneof("event") == "worker_up":
            info = worker_from_proto(entry.worker_up)
            self.workers[info.worker_id] = info

    def after(self, core: SchedulerCore, entry: PlanLogEntry, effects: list[Effect]) -> None:
        """Note ends, and what is known of the speed of workers."""
        self.effects(effects, entry.now)
        if entry.WhichOneof("event") == "report":
            worker = core.workers.get(entry.report.worker_id)
            if worker is not None and worker.pace.step_times.num_observations >= ENOUGH_STEPS:
                self.workers.setdefault(worker.worker_id, worker.info)
                self.prices[worker.worker_id] = worker.pace.step_times.prices()

    def submitted(self, spec: NewRequest, now: float) -> None:
        """Nothing is to be noted of a request that comes."""

    def effects(self, effects: list[Effect], now: float) -> None:
        """Note ends."""
        for effect in effects:
            if isinstance(effect, FinishChoice):
                self.ends[effect.request_id] = effect.timings


def past_of(path: Path) -> Past:
    """Read a plan log.

    Raises:
        PlanLogError: it is none, another version's, or no worker was seen at work.
        OSError: it cannot be read.
    """
    watch = _Watch()
    core = replay(path, watch).core
    if not watch.prices:
        raise PlanLogError(
            f"{path}: no worker has run {ENOUGH_STEPS} steps, so nothing is known of their speed"
        )
    workers = [_simulated(watch.workers[name], prices) for name, prices in watch.prices.items()]
    return Past(core.config, tuple(workers), tuple(replayed_requests(path)), watch.ends)


def _simulated(info: WorkerInfo, prices: Prices) -> SimWorkerConfig:
    times = StepTimes(
        base=prices.step_s,
        prefill_base=0.0,
        per_decode=prices.decode_s,
        per_context_token=prices.context_token_s,
        per_prefill_token=prices.prefill_token_s,
        # Of pairs there are half as many as squares.
        per_prefill_token_squared=prices.pair_s / 2,
    )
    return SimWorkerConfig(
        worker_id=info.worker_id,
        step_times=times,
        model=info.model,
        block_size=info.geometry.block_size,
        num_blocks=info.geometry.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        paged=info.geometry.paged,
    )


def simulate(
    past: Past, policy: str | None = None, without: frozenset[str] = frozenset()
) -> dict[str, ChoiceTimings]:
    """Return how the requests go when those of some tenants do not come, or another policy orders them."""
    watch = _Watch()
    # Nobody is refused: everyone was answered then.
    config = replace(
        past.config, policy=policy or past.config.policy, overload=None, max_waiting_requests=10**6
    )
    cell = SimCell(SchedulerCore(config), past.workers, observers=[watch])
    coming = [(at, spec) for at, spec in past.requests if spec.tenant not in without]
    for at, spec in coming:
        cell.submit_at(_START_S + at, replace(spec, adapter=None))
    last = max((at for at, _ in coming), default=0.0)
    cell.loop.run(until=_MOST_S, stop=lambda: cell.loop.now > _START_S + last and not cell.core.requests)
    return watch.ends


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="its id, as the client or the log has it")
    parser.add_argument("--plan-log", type=Path, metavar="FILE", required=True, help="the log in which it is")
    parser.add_argument(
        "--without-tenant", action="append", default=[], metavar="NAME", help="leave its requests out"
    )
    parser.add_argument("--policy", choices=sorted(POLICIES), help="order the queue so")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Do it and return what there is to say.

    Raises:
        BenchError: the request was not answered in the log, or is of a tenant that is to be left out.
    """
    asked, without = arguments.request_id, frozenset(arguments.without_tenant)
    try:
        core_id, files = find_request(arguments.plan_log, asked)
        past = past_of(files[0])
    except (PlanLogError, OSError) as error:
        raise BenchError(str(error)) from error
    spec = next((spec for _, spec in past.requests if spec.request_id == core_id), None)
    if spec is None:
        raise BenchError(f"request {asked!r} was not answered in {files[0]}")
    if spec.tenant in without:
        raise BenchError(f"request {asked!r} is of a tenant that is to be left out")
    as_it_was = simulate(past)[core_id]
    changed = simulate(past, arguments.policy, without)[core_id]
    sooner_s = as_it_was.queue_s - changed.queue_s
    if arguments.json:
        times = {"then": past.ends[core_id], "simulated": as_it_was, "changed": changed}
        return output.to_json({**times, "sooner_s": sooner_s})
    words = _words(arguments)
    rows = [
        _row("then", past.ends[core_id]),
        _row("simulated as it was", as_it_was),
        _row(f"simulated {words}", changed),
    ]
    times_table = output.table(("", "BEGAN AFTER", "FIRST TOKEN", "ENDED"), rows, right=(1, 2, 3))
    size = output.duration(abs(sooner_s))
    return f"{times_table}\n\n{words} it would have begun {size} {'sooner' if sooner_s >= 0 else 'later'}"


def _words(arguments: argparse.Namespace) -> str:
    parts = [f"without {', '.join(arguments.without_tenant)}"] if arguments.without_tenant else []
    parts += [f"by policy {arguments.policy}"] if arguments.policy else []
    return " and ".join(parts) or "unchanged"


def _row(name: str, timings: ChoiceTimings) -> tuple[str, str, str, str]:
    first = f"{timings.ttft_s:.3f} s" if timings.ttft_s is not None else ""
    return name, f"{timings.queue_s:.3f} s", first, f"{timings.total_s:.3f} s"
