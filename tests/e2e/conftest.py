from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from octavo.stack import Stack, StackConfig

from tests.e2e.worker_stack import Worker, running

SIM = ("--runner", "sim")
# On a slow machine some of the load would be refused otherwise.
CALM = ("--no-overload-control",)


@pytest.fixture(scope="session")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One scheduler and one worker with simulated steps, shared by tests that leave them as they were."""
    config = StackConfig(
        model="sim", worker_args=SIM, scheduler_args=CALM, folder=tmp_path_factory.mktemp("sim-stack")
    )
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """Two simulated workers of a test's own, to be killed and stopped at will."""
    config = StackConfig(model="sim", num_workers=2, worker_args=SIM, scheduler_args=CALM, folder=tmp_path)
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running() as worker:
        yield worker


@pytest.fixture
async def faulty_worker() -> AsyncIterator[Worker]:
    async with running(enable_faults=True) as worker:
        yield worker
