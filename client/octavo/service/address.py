"""The address of a service's port: how it is written, and whether it can be had."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv6Address, ip_address
from typing import Final

_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:\s]+):(?P<port>\d{1,5})")

_SCHEMES: Final = {"grpcs://": True, "https://": True, "grpc://": False}
"""What an endpoint may begin with, and whether it then is spoken to over TLS."""


class AddressTaken(Exception):
    """A port cannot be had; the message is one line."""

    reason = "ADDRESS_TAKEN"


def split_address(address: str, name: str = "address") -> tuple[str, int]:
    """Return the host, without the brackets of an IPv6 address, and the port of `host:port`.

    Raises:
        ValueError: it is not written so; the message begins with the name.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{name} must be host:port, got {address!r}")
    return match["host"].strip("[]"), int(match["port"])


def split_scheme(endpoint: str) -> tuple[bool | None, str]:
    """Return whether an endpoint wants TLS, None when it does not say, and what is behind its scheme."""
    for scheme, secure in _SCHEMES.items():
        if endpoint.startswith(scheme):
            return secure, endpoint.removeprefix(scheme).rstrip("/")
    return None, endpoint


def is_loopback(host: str) -> bool:
    """Return whether a host is its own machine alone; of names, only localhost is taken to be."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def local_host(host: str) -> str:
    """Return where this machine reaches what listens on a host: for all addresses, the loopback one."""
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "::1"}.get(host, host)  # noqa: S104 # compared


def check_address(host: str, port: int) -> None:
    """Find out whether a port can be had: here the reason is one line, in gRPC it is a page.

    Raises:
        AddressTaken: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise AddressTaken(f"cannot listen on {host}:{port}: {error.strerror}") from None
