"""Whether a service takes work: grpc.health.v1, without its package."""

from __future__ import annotations

import enum

import grpc

from octavo._sdk.channel import HEALTH_METHOD, SERVING, channel_options, parse_tls
from octavo.service.address import split_scheme
from octavo.service.tls import Tls, tls_for


class Health(enum.Enum):
    """What a service says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "cannot be reached"


def ask_health(endpoint: str, timeout_s: float, tls: Tls | None = None) -> Health:
    """Return what a service says of itself; without `tls`, the environment says how to connect."""
    secure, options = tls_for(endpoint, parse_tls(tls)), channel_options(endpoint)
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
