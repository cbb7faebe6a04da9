"""The scheduler as a pure, deterministic state machine: events in, effects out."""

from scheduler_svc.core.config import CoreConfig, StaticConfig
from scheduler_svc.core.core import SchedulerCore
from scheduler_svc.core.effects import (
    Accepted,
    ChoiceTimings,
    DetachWorker,
    Effect,
    EmitTokens,
    FinishChoice,
    LogEvent,
    Reject,
    SendCancel,
    SendPlan,
    TokenDelta,
)
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.core.events import NewRequest, WorkerInfo
from scheduler_svc.core.snapshot import CoreSnapshot

__all__ = [
    "Accepted",
    "ChoiceTimings",
    "CoreConfig",
    "CoreError",
    "CoreSnapshot",
    "DetachWorker",
    "Effect",
    "EmitTokens",
    "FinishChoice",
    "LogEvent",
    "NewRequest",
    "Reason",
    "Reject",
    "SchedulerCore",
    "SendCancel",
    "SendPlan",
    "StaticConfig",
    "TokenDelta",
    "WorkerInfo",
]
