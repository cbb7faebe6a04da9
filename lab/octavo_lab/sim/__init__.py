"""A simulated Octavo: the real core, workers without a model, virtual time.

`docs/simulator.md` has an example. Several cells may share one `EventLoop`, each with a core and workers of
its own: that is how early binding is simulated, with a router in front. Whatever has the methods of
`SchedulerCore` may stand in for it, for example to record what goes in. Faults are injected through
`SimCell.hosts`.
"""

from octavo_lab.sim.arrivals import compressed, poisson, request_of
from octavo_lab.sim.cell import SimCell
from octavo_lab.sim.clock import EventLoop
from octavo_lab.sim.faults import FaultInjector, FaultRates
from octavo_lab.sim.monitor import Monitor
from octavo_lab.sim.recorder import Recorder, SimResult
from octavo_lab.sim.worker import SimWorker, SimWorkerConfig

__all__ = [
    "EventLoop",
    "FaultInjector",
    "FaultRates",
    "Monitor",
    "Recorder",
    "SimCell",
    "SimResult",
    "SimWorker",
    "SimWorkerConfig",
    "compressed",
    "poisson",
    "request_of",
]
