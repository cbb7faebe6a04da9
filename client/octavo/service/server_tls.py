"""The listening end of TLS: one certificate for all ports of a service, followed while it changes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from octavo.service.followed import Followed


@dataclass(frozen=True, slots=True)
class _Material:
    grpc: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext


class ServerTls:
    """A certificate with its key and, where clients must present one too, the authorities of theirs.

    The files are looked at in each handshake: a connection gets what they hold when it is made.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises OSError or ValueError when the files cannot be used."""
        self.mutual = client_ca is not None
        self._paths = cert, key, client_ca
        paths = [cert, key, *([client_ca] if client_ca is not None else [])]
        self._files = Followed(paths, self._build, secret=key)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return what a gRPC port listens with."""
        used = self._files.get().grpc

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            now = self._files.get().grpc
            if now is used:
                return None
            used = now
            return now

        return grpc.dynamic_ssl_server_credentials(
            used,
            changed,  # type: ignore[arg-type]  # the stubs do not know that None is no change
            require_client_authentication=self.mutual,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Return what an HTTP port listens with."""
        context = self._context()

        def choose(connection: Any, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self._files.get().context

        context.sni_callback = choose
        return context

    def _build(self, contents: tuple[bytes, ...]) -> _Material:
        # First, because it checks that the key is that of the certificate: gRPC would say so only to callers.
        context = self._context()
        cert, key, *authorities = contents
        config = grpc.ssl_server_certificate_configuration(
            [(key, cert)], authorities[0] if authorities else None
        )
        return _Material(config, context)

    def _context(self) -> ssl.SSLContext:
        cert, key, client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(cert, key, password=_no_password)
            if client_ca is not None:
                context.load_verify_locations(client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise ValueError(f"{cert} and {key}: {error.reason or error}") from None
        return context


def _no_password() -> str:
    raise ValueError("the key has a password; services take keys without one")
