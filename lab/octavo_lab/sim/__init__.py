"""A simulated Octavo: the real core, workers without a model, virtual time.

    core = SchedulerCore(CoreConfig())
    times = StepTimes.builtin()
    workers = [SimWorkerConfig(worker_id=f"w{i}", step_times=times) for i in range(8)]
    recorder = Recorder()
    cell = SimCell(core, workers, observers=[recorder, Monitor(core)])
    for number, arrival in enumerate(compressed(read_trace("azure-conv"), 4.0)):
        cell.submit_at(arrival.at, request_of(arrival, f"r{number}", seed=number))
    cell.loop.run()
    recorder.results

Several cells may share one `EventLoop`, each with a core and workers of its own: that is how early
binding is simulated, with a router in front. Whatever has the methods of `SchedulerCore` may stand in
for it, for example to record what goes in. Faults are injected through `SimCell.hosts`.
"""

from octavo_lab.sim.arrivals import (
    compressed,
    gamma,
    poisson,
    prefix_keys,
    request_of,
)
from octavo_lab.sim.audit import InvariantError, check_core, check_ended, check_nothing_sleeps
from octavo_lab.sim.cell import SimCell, SimObserver
from octavo_lab.sim.clock import EventLoop
from octavo_lab.sim.faults import FaultInjector, FaultRates, Poison
from octavo_lab.sim.host import LinkTimings, StepMachine, WorkerHost
from octavo_lab.sim.monitor import Monitor
from octavo_lab.sim.recorder import Recorder, SimResult
from octavo_lab.sim.tokens import stream_of, token_at
from octavo_lab.sim.worker import PlanFaultError, SimWorker, SimWorkerConfig, WorkerCrashedError

__all__ = [
    "EventLoop",
    "FaultInjector",
    "FaultRates",
    "InvariantError",
    "LinkTimings",
    "Monitor",
    "PlanFaultError",
    "Poison",
    "Recorder",
    "SimCell",
    "SimObserver",
    "SimResult",
    "SimWorker",
    "SimWorkerConfig",
    "StepMachine",
    "WorkerCrashedError",
    "WorkerHost",
    "check_core",
    "check_ended",
    "check_nothing_sleeps",
    "compressed",
    "gamma",
    "poisson",
    "prefix_keys",
    "request_of",
    "stream_of",
    "token_at",
]
