"""The plan log: what came into the core and what it planned, and replay of both. See docs/plan-log.md."""

from scheduler_svc.planlog.errors import PlanLogError
from scheduler_svc.planlog.explain import Line, RequestStory, Waits
from scheduler_svc.planlog.reader import PlanLogReader
from scheduler_svc.planlog.recording import PlanLogHealth, RecordingCore
from scheduler_svc.planlog.replay import Mismatch, Observer, ReplayResult, replay
from scheduler_svc.planlog.requests import replayed_requests
from scheduler_svc.planlog.usage import usage_of
from scheduler_svc.planlog.writer import PlanLogWriter

__all__ = [
    "Line",
    "Mismatch",
    "Observer",
    "PlanLogError",
    "PlanLogHealth",
    "PlanLogReader",
    "PlanLogWriter",
    "RecordingCore",
    "ReplayResult",
    "RequestStory",
    "Waits",
    "replay",
    "replayed_requests",
    "usage_of",
]
