"""gRPC options of the hop between scheduler and worker; both ends must agree on pings and sizes.

A stream on this hop may be silent for hours and must live, and a half-open one must be found in
seconds: HTTP/2 pings go out every second in both directions, whether or not calls are running, and
neither side takes offence.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Plans carry whole prompts, descriptions carry tokenizers."""
PING_INTERVAL_MS: Final = 1_000
PING_TIMEOUT_MS: Final = 3_000
"""A process starved of CPU for less than this is not taken for dead."""
WINDOW_BYTES: Final = 4 * 2**20
"""What may be under way in one direction."""

Options = tuple[tuple[str, int], ...]

_BOTH: Final[Options] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A keepalive that finds another ping under way waits for that one, by default for a minute.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    # Bandwidth probes are such pings. A wide window from the start does without them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
CLIENT_OPTIONS: Final[Options] = (
    *_BOTH,
    # A worker that comes back is found at once, and one that is starved of CPU gets time to answer:
    # the second of these bounds a connection attempt, whatever its name.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", PING_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
SERVER_OPTIONS: Final[Options] = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
