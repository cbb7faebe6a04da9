"""The scheduler as a pure, deterministic state machine: events in, effects out.

The methods of `SchedulerCore` that take an event return its effects, in the order in which they came
about. Inside, what decides returns its decision (`admission`, `planning`, `bisection`). Only `core`,
`lifecycle` and `reports` hand on `out`, the list of the event at hand, and append to it: one end leads to
others (a choice, its request, the breaker, a worker's plan), the list keeps them in order at any depth,
and a report that turns out to be wrong half-way still delivers the tokens that came before the fault.

What asks (`refusal`, `better_elsewhere`, `may_join`, `order`, `snapshot`, ...) changes nothing that a
later event could see; indexes and timers may drop stale entries while they look.
"""

from scheduler_svc.core.config import CoreConfig, StaticConfig
from scheduler_svc.core.core import SchedulerCore
from scheduler_svc.core.effects import (
    ChargeTenant,
    ChoiceTimings,
    DetachWorker,
    Effect,
    EmitEmbedding,
    EmitPromptLogprobs,
    EmitTokens,
    FinishChoice,
    LogEvent,
    Reject,
    RequestAccepted,
    SendCancel,
    SendPlan,
    TokenDelta,
)
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import NewRequest, WorkerInfo
from scheduler_svc.core.snapshot import CoreSnapshot

__all__ = [
    "ChargeTenant",
    "ChoiceTimings",
    "CoreConfig",
    "CoreError",
    "CoreSnapshot",
    "DetachWorker",
    "Effect",
    "EmitEmbedding",
    "EmitPromptLogprobs",
    "EmitTokens",
    "FinishChoice",
    "LogEvent",
    "NewRequest",
    "Reason",
    "Reject",
    "RequestAccepted",
    "SchedulerCore",
    "SendCancel",
    "SendPlan",
    "StaticConfig",
    "TokenDelta",
    "WorkerInfo",
]
