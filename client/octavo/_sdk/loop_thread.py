"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from octavo.errors import ClientClosedError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads. Belongs to the process that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        thread = threading.Thread(target=_run, args=(self._loop,), name="octavo-client", daemon=True)
        thread.start()
        self._thread_id = thread.ident
        # Also runs when the interpreter exits.
        self._stop = weakref.finalize(self, _stop, self._loop, thread, self._pid)

    @property
    def usable(self) -> bool:
        """Whether the loop runs, and in this process."""
        return os.getpid() == self._pid and self._stop.alive

    def check(self) -> None:
        """Raise unless the loop can be used from here."""
        self.check_process()
        if not self._stop.alive:
            raise ClientClosedError("the client is closed")

    def check_process(self) -> None:
        """Raise in a child of the process that made it."""
        if os.getpid() != self._pid:
            raise ClientClosedError("the client was made before a fork; make a new one in the child process")

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return what the coroutine returns. An exception in the waiting thread cancels it.

        Raises:
            ClientClosedError: the loop cannot be used from here.
            RuntimeError: called on the thread of the loop, which would wait for itself.
        """
        try:
            self.check()
            if threading.get_ident() == self._thread_id:
                raise RuntimeError("the client's own thread cannot wait for the client")
        except (ClientClosedError, RuntimeError):
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that nobody waits for; forget it where the loop does not run."""
        if self.usable:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        else:
            coroutine.close()

    def stop(self) -> None:
        """End the thread; nothing happens when it has ended."""
        self._stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid and thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout=5)
