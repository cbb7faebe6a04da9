"""Whether a gRPC channel goes through an HTTP proxy: never to this machine, else as the environment says."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from octavo.service.address import split_scheme

# gRPC reads these, in this order, and only so spelled.
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_NO_PROXY: Final = (("grpc.enable_http_proxy", 0),)


def proxy_options(target: str, env: Mapping[str, str] = os.environ) -> tuple[tuple[str, int], ...]:
    """Return the options of a channel to `target` that keep it off a proxy which it must not use."""
    return () if proxy_of(target, env) else _NO_PROXY


def proxy_of(target: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the proxy that a channel to `target` goes through, None for a direct one.

    Args:
        target: an endpoint, or what gRPC takes: `host:port`, `dns:host:port`, `ipv4:...`, `unix:path`.
        env: the environment. Unlike gRPC itself, `NO_PROXY` counts in capitals, too.
    """
    proxy = next((env[name] for name in _PROXIES if env.get(name)), None)
    host = host_of(target)
    if proxy is None or host is None or _is_this_machine(host) or _is_excepted(host, env):
        return None
    return proxy


def host_of(target: str) -> str | None:
    """Return the host of a target without brackets; None for a socket in the file system."""
    _, target = split_scheme(target)
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract", "vsock"):
        return None
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest
        if target.startswith("//"):  # dns://authority/host:port
            target = target.removeprefix("//").partition("/")[2]
    target = unquote(target)
    if target.startswith("["):
        return target[1:].partition("]")[0]
    return target.partition(":")[0] if target.count(":") <= 1 else target


def _is_this_machine(host: str) -> bool:
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or address.is_unspecified or (mapped is not None and mapped.is_loopback)


def _is_excepted(host: str, env: Mapping[str, str]) -> bool:
    """Return whether the user excepts a host: by its name, by a domain it is in, or with `*`."""
    for name in _EXCEPTIONS:
        for entry in env.get(name, "").split(","):
            suffix = entry.strip().lstrip(".").lower()
            if suffix and (suffix == "*" or host.lower() == suffix or host.lower().endswith(f".{suffix}")):
                return True
    return False
