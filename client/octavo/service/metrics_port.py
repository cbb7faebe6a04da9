"""The port of Prometheus metrics: HTTP from a thread of its own, over TLS where the service has it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from octavo.service.address import check_address
from octavo.service.call_guard import Metadata, bearer_key
from octavo.service.server_tls import ServerTls

Refusal = Callable[[str | None], HTTPStatus | None]
"""Why somebody with this key, as presented, may not see the metrics; None when they may."""
_TIMEOUT_S: Final = 10.0
"""For what a client sends and reads, and for the handshake."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        """Say nothing of scrapes."""

    def handle(self) -> None:
        """Answer, unless what comes is no TLS, or no certificate that is wanted."""
        try:
            super().handle()
        except (OSError, ValueError):
            self.close_connection = True


class MetricsPort:
    """Serves a registry until it is closed."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        tls: ServerTls | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """Raises AddressTaken when the port cannot be had."""
        check_address(host, port)
        app = make_wsgi_app(registry)

        def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            refused = refusal(bearer_key(_metadata(environ))) if refusal is not None else None
            if refused is not None:
                challenge = [("WWW-Authenticate", "Bearer")] if refused is HTTPStatus.UNAUTHORIZED else []
                start_response(f"{refused.value} {refused.phrase}", [*challenge, ("Content-Length", "0")])
                return [b""]
            return list(app(environ, start_response))

        server = _Server6 if ":" in host else _Server
        self._server = make_server(host, port, guarded, server, _Handler)
        if tls is not None:
            # The handshake belongs to the thread of the connection: nobody shall keep others waiting with it.
            self._server.socket = tls.ssl_context().wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _metadata(environ: dict[str, Any]) -> Metadata:
    given = environ.get("HTTP_AUTHORIZATION")
    return (("authorization", given),) if given is not None else ()
