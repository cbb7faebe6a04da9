"""Whether a service takes work: grpc.health.v1, without its package."""

from __future__ import annotations

import enum
from typing import Final

import grpc

from octavo._sdk.channel import channel_options

# An empty request asks for the server as a whole, the answer's first field is its state.
_METHOD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"


class Health(enum.Enum):
    """What a service says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "cannot be reached"


def ask_health(endpoint: str, timeout_s: float) -> Health:
    """Return what a service says of itself."""
    with grpc.insecure_channel(endpoint, options=channel_options(endpoint)) as channel:
        check = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            return Health.SERVING if bytes(check(b"", timeout=timeout_s)) == _SERVING else Health.NOT_SERVING
        except grpc.RpcError:
            return Health.UNREACHABLE
