from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.stack import Stack, StackConfig

SIM = ("--runner", "sim")


@pytest.fixture(scope="session")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One scheduler and one worker with simulated steps, shared by tests that leave them as they were."""
    config = StackConfig(model="sim", worker_args=SIM, folder=tmp_path_factory.mktemp("sim-stack"))
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """Two simulated workers of a test's own, to be killed and stopped at will."""
    config = StackConfig(model="sim", num_workers=2, worker_args=SIM, folder=tmp_path)
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack
