"""Whether a service takes work: grpc.health.v1 without its package, and a gateway's /health."""

from __future__ import annotations

import enum
import http.client
from typing import Final
from urllib.parse import urlsplit

import grpc

from octavo._sdk.channel import HEALTH_METHOD, SERVING, channel_options

_SCHEMES: Final = ("http://", "https://")
_CONNECTIONS: Final = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class Health(enum.Enum):
    """What a service says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "cannot be reached"


def is_url(address: str) -> bool:
    """Return whether an address is that of a gateway, and no gRPC endpoint."""
    return address.startswith(_SCHEMES)


def ask_health(endpoint: str, timeout_s: float) -> Health:
    """Return what a service says of itself; the endpoint is host:port, or the URL of a gateway."""
    if is_url(endpoint):
        return _ask_gateway(endpoint, timeout_s)
    with grpc.insecure_channel(endpoint, options=channel_options(endpoint)) as channel:
        check = channel.unary_unary(HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            return Health.SERVING if bytes(check(b"", timeout=timeout_s)) == SERVING else Health.NOT_SERVING
        except grpc.RpcError:
            return Health.UNREACHABLE


def _ask_gateway(url: str, timeout_s: float) -> Health:
    """Ask without a proxy: a probe asks the process beside it."""
    parts = urlsplit(url)
    try:
        connection = _CONNECTIONS[parts.scheme](parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.request("GET", parts.path.rstrip("/") + "/health")
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return Health.UNREACHABLE
    return Health.SERVING if status == 200 else Health.NOT_SERVING
