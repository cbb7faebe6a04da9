"""Shows how far the loading of a model is: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import structlog
from rich import progress as bars
from rich.console import Console

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is (0 to 1), from any thread."""
_LOG_EVERY: Final = 0.25
log = structlog.get_logger(__name__)


class LoadingProgress:
    """A `Progress` to be called while it is open."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
        )
        console = Console(stderr=True, force_terminal=terminal)
        self._bars = bars.Progress(*columns, console=console, transient=True)
        self._task: bars.TaskID | None = None
        self._what = ""
        self._logged = 0.0

    def __enter__(self) -> Self:
        if self._terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._bars.stop()

    def __call__(self, what: str, fraction: float) -> None:
        """Report that `what` is done to `fraction`."""
        if self._terminal:
            if self._task is None or what != self._what:
                self._task = self._bars.add_task(what, total=1.0)
            self._bars.update(self._task, completed=fraction)
        elif what != self._what or fraction >= self._logged + _LOG_EVERY:
            self._logged = fraction
            log.info("model_loading", what=what, percent=round(100 * fraction))
        self._what = what
