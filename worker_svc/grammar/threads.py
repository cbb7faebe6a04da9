"""Threads that a grammar may hold for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final, ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")
_MAX_LOST: Final = 8
"""So many that do not come back are replaced; each of them takes a core."""
log = structlog.get_logger(__name__)


class Threads:
    """Run calls in the order in which they come. They do not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._name = name
        self._count = 0
        self._num_lost = 0
        for _ in range(count):
            self._add()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Return what a call will come to."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
                result.set_exception(error)

        self._calls.put(call)
        return result

    def replace_lost(self) -> None:
        """One of them will not come back: let another do its work."""
        self._num_lost += 1
        log.error("grammar_thread_lost", name=self._name, lost=self._num_lost)
        if self._num_lost <= _MAX_LOST:
            self._add()

    def close(self) -> None:
        """End them when they have done what they have."""
        for _ in range(self._count):
            self._calls.put(None)

    def _add(self) -> None:
        self._count += 1
        threading.Thread(target=self._run, name=f"{self._name}-{self._count}", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
