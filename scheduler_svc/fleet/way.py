"""The way to a worker: in plaintext or over TLS, and with what shows that it is its scheduler who comes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from octavo.protocol.proxy import proxy_options
from octavo.protocol.transport import CLIENT_OPTIONS
from octavo.service.address import split_scheme
from octavo.service.followed import Followed
from octavo.service.tls import Tls, TlsFiles, tls_for
from octavo.service.worker_secret import WorkerSecret

# A worker that is back should not wait to be found.
_MAX_RECONNECT_MS: Final = 250
_OPTIONS: Final = (
    *(option for option in CLIENT_OPTIONS if option[0] != "grpc.max_reconnect_backoff_ms"),
    ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
    # Links to one address must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Way:
    """How one worker is reached."""

    address: str
    name: str | None
    """Whom its certificate must be of, where that is not the host of the address."""
    _tls: Followed[TlsFiles] | None
    _secret: WorkerSecret | None

    def files(self) -> TlsFiles | None:
        """Return what a channel is secured with now, None in plaintext."""
        return self._tls.get() if self._tls is not None else None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with each call."""
        return self._secret.metadata() if self._secret is not None else ()

    def open(self, files: TlsFiles | None) -> grpc.aio.Channel:
        """Return a new channel."""
        options = (*_OPTIONS, *proxy_options(self.address))
        if files is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return files.channel(self.address, options, self.name)


class Ways:
    """The ways to all workers of a scheduler."""

    def __init__(self, tls: Tls | None = None, secret: WorkerSecret | None = None) -> None:
        self._tls = tls
        self._secret = secret

    def to(self, target: str, address: str | None = None) -> Way:
        """Return the way to a target; for a name in DNS, to an `address` that was found for it.

        Raises:
            OSError: a file of TLS cannot be read.
        """
        tls = tls_for(target, self._tls)
        found = None
        if tls is not None:
            paths = [Path(path) for path in (tls.ca, tls.cert, tls.key) if path is not None]
            found = Followed(paths, lambda _: _checked(tls), secret=Path(tls.key) if tls.key else None)
        _, named = split_scheme(target)
        host = named.removeprefix("dns:").rpartition(":")[0].strip("[]") if address is not None else None
        return Way(address or named, host, found, self._secret)


def _checked(tls: Tls) -> TlsFiles:
    """Return what the files hold; raises OSError while it does not fit together."""
    tls.ssl_context()
    return tls.read()
