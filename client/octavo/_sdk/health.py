"""Whether a service takes work: grpc.health.v1 without its package, and a gateway's /health."""

from __future__ import annotations

import enum
import http.client
from typing import Final
from urllib.parse import urlsplit

import grpc

from octavo._sdk.channel import HEALTH_METHOD, SERVING, channel_options, parse_tls
from octavo.service.address import split_scheme
from octavo.service.tls import Tls, tls_for

_SCHEMES: Final = ("http://", "https://")


class Health(enum.Enum):
    """What a service says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "cannot be reached"


def is_url(address: str) -> bool:
    """Return whether an address is that of a gateway, and no gRPC endpoint."""
    return address.startswith(_SCHEMES)


def ask_health(endpoint: str, timeout_s: float, tls: Tls | None = None) -> Health:
    """Return what a service says of itself; the endpoint is host:port, or the URL of a gateway.

    Without `tls`, the environment says how to connect.
    """
    secure = tls_for(endpoint, parse_tls(tls))
    if is_url(endpoint):
        return _ask_gateway(endpoint, timeout_s, secure)
    options = channel_options(endpoint)
    _, target = split_scheme(endpoint)
    if secure is None:
        opened = grpc.insecure_channel(target, options=options)
    else:
        opened = grpc.secure_channel(target, secure.read().credentials(), options=options)
    with opened as channel:
        check = channel.unary_unary(HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            return Health.SERVING if bytes(check(b"", timeout=timeout_s)) == SERVING else Health.NOT_SERVING
        except grpc.RpcError:
            return Health.UNREACHABLE


def _ask_gateway(url: str, timeout_s: float, tls: Tls | None) -> Health:
    """Ask without a proxy: a probe asks the process beside it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        connection = (
            http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
            if tls is None
            else http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=tls.ssl_context())
        )
        try:
            connection.request("GET", parts.path.rstrip("/") + "/health")
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return Health.UNREACHABLE
    return Health.SERVING if status == 200 else Health.NOT_SERVING
