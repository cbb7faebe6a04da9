"""Errors of the worker, each with a stable reason."""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the worker's errors."""

    reason = "WORKER"


class ModelLoadError(WorkerError):
    """The model cannot be loaded; the message names the file and what is wrong with it."""

    reason = "MODEL_LOAD"


class InvalidSettings(WorkerError):
    """The settings cannot work together; the message shows the arithmetic."""

    reason = "SETTINGS"


class RunnerError(WorkerError):
    """A step failed and advanced nothing."""

    reason = "EXCEPTION"

    def __init__(self, message: str, handles: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.handles = handles


class StepFailed(RunnerError):
    """The runner raised; `handles` names the culprits when they are known."""


class NotFinite(StepFailed):
    """Sequences, which are named, computed something else than numbers."""

    reason = "INVALID_VALUE"


class NothingAllowed(StepFailed):
    """Sequences, which are named, may sample no token: what is allowed is banned by something else."""

    reason = "NOTHING_ALLOWED"

    def __init__(self, handles: tuple[int, ...]) -> None:
        super().__init__("every token that is allowed is banned", handles)


class StepOutOfMemory(RunnerError):
    """The device ran out of memory during the step."""

    reason = "OOM"


class DeviceLost(WorkerError):
    """The device is gone; the process cannot go on."""

    reason = "DEVICE"
