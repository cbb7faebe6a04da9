"""Ports that a stack would take, schedulers that commands would speak to, and proxies between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from octavo._sdk.channel import DEFAULT_ENDPOINT, parse_endpoints
from octavo._sdk.health import Health, ask_health
from octavo.checks.finding import Check, Finding, failed, fine, warning
from octavo.errors import InvalidRequestError
from octavo.protocol.proxy import host_of, proxy_of
from octavo.service.address import AddressTaken, check_address

_HEALTH_TIMEOUT_S: Final = 3.0
_OUR_MODULES: Final = ("octavo.cli.main", "octavo._child")
_COMMAND_CHARACTERS: Final = 60
_LISTENING: Final = "0A"
"""State of a socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of the stack."""

    number: int
    use: str
    flag: str = ""
    """Of `octavo up`, to take another one; empty where it takes another one by itself."""


@dataclass(frozen=True, slots=True)
class Process:
    """Who has a port."""

    number: int
    command: tuple[str, ...]

    @property
    def is_octavo(self) -> bool:
        """Whether it is one of ours, rather than one whose files lie in a folder of this name."""
        program = any(Path(word).name == "octavo" for word in self.command[:2])
        return program or any(word in _OUR_MODULES for word in self.command)

    def __str__(self) -> str:
        return f"`{' '.join(self.command)[:_COMMAND_CHARACTERS]}` (process {self.number})"


def ports(
    host: str, wanted: list[Port], user_of: Callable[[int], Process | None] | None = None
) -> Iterator[Finding]:
    """Tell which ports can be had, and who has the others."""
    free = []
    for port in wanted:
        try:
            check_address(host, port.number)
        except AddressTaken as error:
            yield _taken(port, str(error), (user_of or process_on)(port.number))
        else:
            free.append(f"{port.number} ({port.use})")
    if free:
        yield fine(f"free on {host}: {', '.join(free)}")


def _taken(port: Port, problem: str, user: Process | None) -> Finding:
    found = f"{port.number} ({port.use}): {problem}" + (f"; {user} has it" if user else "")
    if not port.flag:
        return fine(f"{found}, so octavo up takes another")
    advice = f"octavo up {port.flag} 0 takes a free one"
    if user is not None and user.is_octavo:
        return warning(found, f"use what runs here already, or {advice}")
    return failed(found, f"end it, or {advice}")


def process_on(port: int, proc: Path = Path("/proc")) -> Process | None:
    """Return the process that listens on a port; None where the system does not tell."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = (line.split() for line in lines)
        inodes |= {
            f"socket:[{row[9]}]"
            for row in rows
            if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
        }
    for entry in proc.glob("[0-9]*/fd/*") if inodes else ():
        try:
            if str(entry.readlink()) in inodes:
                process = entry.parents[1]
                command = (process / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
                return Process(int(process.name), tuple(command))
        except OSError:  # It belongs to another user, or has ended.
            continue
    return None


def endpoints(
    env: Mapping[str, str] = os.environ, ask: Callable[[str, float], Health] = ask_health
) -> Iterator[Finding]:
    """Tell whether the schedulers of OCTAVO_ENDPOINT take work."""
    given = env.get("OCTAVO_ENDPOINT")
    if not given:
        yield fine(f"OCTAVO_ENDPOINT is not set: commands go to {DEFAULT_ENDPOINT}, or where --endpoint says")
        return
    try:
        parsed = parse_endpoints(given)
    except InvalidRequestError as error:
        yield warning(f"OCTAVO_ENDPOINT: {error.message}", "write it as host:port, several with commas")
        return
    for endpoint in parsed:
        health = ask(endpoint, _HEALTH_TIMEOUT_S)
        if health is Health.SERVING:
            yield fine(f"{endpoint} is serving")
        elif health is Health.NOT_SERVING:
            yield warning(f"{endpoint} answers, but takes no work", "it starts or drains: see octavo status")
        else:
            advice = "see that it runs and that the name, the port and the way to it are right"
            yield warning(f"{endpoint} cannot be reached", advice)


def proxies(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Tell which of the endpoints would be reached through a proxy."""
    variables = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if env.get(name)]
    if not variables:
        yield fine("no proxy variables that gRPC reads")
        return
    try:
        parsed = parse_endpoints(env.get("OCTAVO_ENDPOINT") or DEFAULT_ENDPOINT)
    except InvalidRequestError:
        parsed = ()
    through = [endpoint for endpoint in parsed if proxy_of(endpoint, env)]
    if not through:
        yield fine(f"{', '.join(variables)}: not for loopback, and for no endpoint that is set")
    else:
        hosts = ",".join(host_of(endpoint) or "" for endpoint in through)
        found = f"{', '.join(through)} would be reached through the proxy of {variables[0]}"
        yield warning(found, f"where that is not meant: export no_proxy={hosts}")


def checks(host: str, wanted: list[Port]) -> tuple[Check, ...]:
    """Return the checks of the network for a stack on these ports."""
    return (
        Check("ports", lambda: ports(host, wanted)),
        Check("endpoints", endpoints, limit_s=30.0),
        Check("proxies", proxies),
    )
