"""Whether a service takes work: grpc.health.v1, without its package."""

from __future__ import annotations

import enum

import grpc

from octavo._sdk.channel import HEALTH_METHOD, SERVING, channel_options


class Health(enum.Enum):
    """What a service says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "cannot be reached"


def ask_health(endpoint: str, timeout_s: float) -> Health:
    """Return what a service says of itself."""
    with grpc.insecure_channel(endpoint, options=channel_options(endpoint)) as channel:
        check = channel.unary_unary(HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            return Health.SERVING if bytes(check(b"", timeout=timeout_s)) == SERVING else Health.NOT_SERVING
        except grpc.RpcError:
            return Health.UNREACHABLE
