"""The gateway process: from settings to exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import structlog
import uvicorn
from prometheus_client import disable_created_metrics

from octavo._sdk.channel import parse_endpoints
from octavo.errors import InvalidRequestError
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.gateway.connections import RESERVED, Connections, Protocol, Timeouts
from octavo.protocol.proxy import proxy_of
from octavo.service.descriptors import descriptor_limit, raise_limit
from octavo.service.memory import return_what_is_freed
from octavo.service.security import server_tls
from octavo.service.settings import ServerSection

_log = structlog.get_logger()
EXIT_FAILED: Final = 1
EXIT_ADDRESS_TAKEN: Final = 4
_BACKLOG: Final = 2048
_OTHER_DESCRIPTORS: Final = RESERVED + 128
"""Kept for health and metrics, connections that are being refused, the scheduler, and the process itself."""
_MAX_DIGITS: Final = 640
"""Of an integer: to read more takes time by their square, and no number in a body has as many."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn's server, for which SIGTERM and SIGINT are the normal end: it does not raise them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal; a second one does not wait for what runs."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(settings: GatewaySettings) -> int:
    """Serve until told to stop; return the exit code."""
    settings.start_logging()
    raise_limit()
    return_what_is_freed()
    sys.set_int_max_str_digits(_MAX_DIGITS)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped library
    # Its access log would be a second line for each request; its errors are ours to tell.
    logging.getLogger("uvicorn.access").disabled = True
    tls = server_tls(settings.server)
    try:
        app = create_app(settings)
    except (OSError, UnicodeError, InvalidRequestError) as error:
        _log.error("gateway_cannot_start", reason="API_KEY", problem=f"the key cannot be used: {error}")
        return EXIT_FAILED
    try:
        listener = _listen(settings.server)
    except OSError as error:
        _log.error(
            "gateway_cannot_start",
            reason="ADDRESS_TAKEN",
            problem=f"{settings.server.listen}: {error.strerror}",
        )
        return EXIT_ADDRESS_TAKEN
    host, port = listener.getsockname()[:2]
    _log.info(
        "gateway_listening",
        address=f"{host}:{port}",
        tls=tls is not None,
        endpoint=settings.scheduler.endpoint,
    )
    for endpoint in parse_endpoints(settings.scheduler.endpoint):
        if (proxy := proxy_of(endpoint)) is not None:
            _log.info("scheduler_through_proxy", endpoint=endpoint, proxy=proxy)
    config = server_config(app, settings)
    if tls is not None:
        # Before it is loaded uvicorn makes a context of its own, from files that it reads once.
        config.load()
        config.ssl = tls.ssl_context()
    server = Server(config)
    # What is there now stays: the collector need not look at it again and again.
    gc.freeze()
    server.run(sockets=[listener])
    _log.info("gateway_stopped")
    return 0 if server.started else EXIT_FAILED


def server_config(app: Any, settings: GatewaySettings) -> uvicorn.Config:
    """Return how uvicorn serves the application."""
    given = settings.server
    timeouts = Timeouts(given.head_timeout_s, given.read_timeout_s, given.write_timeout_s)
    max_connections = given.max_connections
    descriptors = descriptor_limit()
    if descriptors is not None and descriptors - _OTHER_DESCRIPTORS < max_connections:
        max_connections = max(2, descriptors - _OTHER_DESCRIPTORS)
        _log.warning(
            "connections_limited_by_descriptors", descriptors=descriptors, connections=max_connections
        )
    return uvicorn.Config(
        app,
        # uvicorn calls it with what a connection of its own would get, and needs no class for that.
        http=cast("type[asyncio.Protocol]", partial(Protocol, Connections(max_connections, timeouts))),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.server.keep_alive_s,
        timeout_graceful_shutdown=settings.process.drain_grace_s,
        backlog=_BACKLOG,
    )


def _listen(settings: ServerSection) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
