"""What is told of ports, endpoints and proxies."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo._sdk.health import Health
from octavo.checks import network
from octavo.checks.finding import Mark
from octavo.stack import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


NGINX = network.Process(5, ("nginx",))
NEIGHBOUR = network.Process(5, ("/home/me/octavo/.venv/bin/python", "-m", "http.server"))
OURS = network.Process(5, ("/usr/bin/python3", "-m", "octavo._child", "4", "octavo.cli.main", "gateway"))
SCRIPT = network.Process(5, ("/usr/bin/python3", "/usr/bin/octavo", "scheduler"))


@pytest.mark.parametrize(
    ("user", "flag", "mark"),
    [
        (NGINX, "--port", Mark.FAILED),
        (NEIGHBOUR, "--port", Mark.FAILED),
        (None, "--port", Mark.FAILED),
        (OURS, "--port", Mark.WARNING),
        (SCRIPT, "--port", Mark.WARNING),
        (NGINX, "", Mark.FINE),
    ],
)
def test_port_that_is_taken_is_told_by_who_has_it(
    taken: int, user: network.Process | None, flag: str, mark: Mark
) -> None:
    free = free_port()
    wanted = [network.Port(taken, "scheduler", flag), network.Port(free, "worker", "--worker-port")]
    first, second = network.ports("127.0.0.1", wanted, lambda port: user)

    assert first.mark is mark
    assert f"{taken} (scheduler)" in first.found
    assert "in use" in first.found
    assert user is None or f"{user} has it" in first.found
    assert ("octavo up --port 0" in first.advice) == (mark is not Mark.FINE)
    assert (second.mark, second.found) == (Mark.FINE, f"free on 127.0.0.1: {free} (worker)")


def test_process_on_a_port_is_named(taken: int) -> None:
    user = network.process_on(taken)

    assert user is not None
    assert user.number == os.getpid()
    # A runner of tests may have renamed this process.
    assert "\0".join(user.command) == Path("/proc/self/cmdline").read_text().rstrip("\0")
    assert network.process_on(free_port()) is None


def test_process_on_a_port_is_unknown_where_the_system_does_not_tell(taken: int, tmp_path: Path) -> None:
    assert network.process_on(taken, tmp_path) is None


def test_endpoints_are_told_by_their_health() -> None:
    health = {"a:1": Health.SERVING, "b:2": Health.NOT_SERVING, "c:3": Health.UNREACHABLE}
    found = list(network.endpoints({"OCTAVO_ENDPOINT": "a:1,b:2,c:3"}, lambda one, timeout_s: health[one]))

    assert [one.mark for one in found] == [Mark.FINE, Mark.WARNING, Mark.WARNING]
    assert [one.found.split()[0] for one in found] == ["a:1", "b:2", "c:3"]
    assert all(one.advice for one in found[1:])


def test_endpoint_written_wrong_is_told() -> None:
    (found,) = network.endpoints({"OCTAVO_ENDPOINT": "http://somewhere"})
    (unset,) = network.endpoints({})

    assert (found.mark, unset.mark) == (Mark.WARNING, Mark.FINE)
    assert "host:port" in found.found
    assert "127.0.0.1:50051" in unset.found


@pytest.mark.parametrize(
    ("env", "mark", "said"),
    [
        ({}, Mark.FINE, "no proxy variables"),
        ({"http_proxy": "http://u:secret@p:1"}, Mark.FINE, "not for loopback"),
        (
            {"https_proxy": "http://u:secret@p:1", "OCTAVO_ENDPOINT": "far:1,127.0.0.1:2"},
            Mark.WARNING,
            "far:1 would be reached through the proxy of https_proxy",
        ),
        (
            {"http_proxy": "http://u:secret@p:1", "OCTAVO_ENDPOINT": "far:1", "NO_PROXY": "far"},
            Mark.FINE,
            "no endpoint",
        ),
        ({"http_proxy": "http://p:1", "OCTAVO_ENDPOINT": "http://wrong"}, Mark.FINE, "no endpoint"),
    ],
)
def test_proxies_are_told_by_what_they_are_used_for(env: dict[str, str], mark: Mark, said: str) -> None:
    (found,) = network.proxies(env)

    assert found.mark is mark
    assert said in found.found
    assert "secret" not in found.found + found.advice
    assert ("no_proxy=far" in found.advice) == (mark is Mark.WARNING)
