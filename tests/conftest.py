"""What all tests share."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from worker_svc.runner.vllm.installed import SUPPORTED_VERSION, installed_version

REQUIRE_VLLM = "OCTAVO_REQUIRE_VLLM"

# A job in the background of a script ignores it, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests are about what holds, not about how fast this machine is at the moment.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time, so that a change is judged by what it changes. `make explore` looks for others.
settings.register_profile("repeatable", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, print_blob=True)
settings.load_profile("explore" if os.environ.get("OCTAVO_EXPLORE") else "repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM where it is not installed, and say so; CI requires it, and fails instead."""
    if installed_version() == SUPPORTED_VERSION or os.environ.get(REQUIRE_VLLM):
        return
    skip = pytest.mark.skip(reason=f"needs vLLM {SUPPORTED_VERSION}: scripts/install_vllm_cpu.sh installs it")
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(skip)
