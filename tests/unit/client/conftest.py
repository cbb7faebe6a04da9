from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from octavo import AsyncClient

from tests.unit.client.fake_scheduler import FakeScheduler, ThreadedScheduler


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(scheduler: FakeScheduler) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(scheduler.endpoint, connect_timeout=5, reconnect_timeout=5) as one:
        yield one


@pytest.fixture
def threaded() -> Iterator[ThreadedScheduler]:
    one = ThreadedScheduler()
    yield one
    one.close()
