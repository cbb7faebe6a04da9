"""What a service says of itself while it is driven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.status import Status


@asynccontextmanager
async def status_told(
    client: AsyncClient, interval_s: float, note: Callable[[Status, float], None]
) -> AsyncIterator[None]:
    """Pass each status on, with the seconds since the block began, for as long as the block lasts.

    When the scheduler is gone there is nothing more to note: the requests tell.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def watch() -> None:
        with suppress(OctavoError):
            async for status in client.watch_status(interval_s):
                note(status, loop.time() - began)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
