"""The worst body for every RPC and route, built by a program: refused rightly, and a neighbour streams on.

Small ones here; `make scorecard ONLY='hardening.*' LONG=1` sends them at the size limit and takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.stack import Stack, StackConfig
from octavo_lab.hardening.messages import ALLOWED, rpcs, worst_messages
from octavo_lab.hardening.neighbour import Door
from octavo_lab.hardening.siege import Siege

SIZE = 16 << 10


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    worker_args, scheduler_args = ("--runner", "sim", "--sim-speed", "50"), ("--no-overload-control",)
    config = StackConfig(
        model="sim", worker_args=worker_args, scheduler_args=scheduler_args, gateway_port=0, folder=folder
    )
    with Stack(config) as stack:
        stack.wait_ready(120)
        yield stack


@pytest.mark.parametrize("door", ["grpc", "http"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_worst_bodies_are_refused_and_a_neighbour_streams_on(stack: Stack, door: Door, stride: int) -> None:
    siege = Siege(stack, grpc_bytes=SIZE, http_bytes=SIZE, stride=stride)

    siege.run((door,))

    assert len(siege.effects) > 500 // stride
    blamed = [str(one) for one in siege.effects if one.is_blamed_on_us]
    assert blamed == []
    assert siege.harmed == 0


def test_bodies_are_built_for_every_method_and_each_is_near_the_size() -> None:
    known = {one.path for one in rpcs()}
    assert {
        "/octavo.v1.Generation/Session",
        "/octavo.v1.Operations/Drain",
        "/octavo.v1.Worker/Attach",
    } < known
    bodies = [body for one in rpcs() for body in worst_messages(one.message, SIZE)]
    assert any(ALLOWED in body.name for body in bodies)
    sizes = [len(body.build()) for body in bodies if ALLOWED not in body.name]
    assert min(sizes) > SIZE // 3
    assert max(sizes) < 2 * SIZE
