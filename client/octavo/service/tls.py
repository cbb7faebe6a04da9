"""The calling end of a TLS connection, and how an endpoint says that it wants one."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from octavo.service.address import split_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM for a TLS connection. They are read for each connection, so they may be replaced."""

    ca: str | Path | None = None
    """Authorities by which the other side is checked; None is those that gRPC brings along."""
    cert: str | Path | None = None
    """Certificate that is presented, with the chain that leads to its authority."""
    key: str | Path | None = None
    """Private key of `cert`."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Tls | None:
        """Return what OCTAVO_TLS_CA, OCTAVO_TLS_CERT and OCTAVO_TLS_KEY say, None when none is set."""
        ca, cert, key = (env.get(f"OCTAVO_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
        return cls(ca=ca, cert=cert, key=key) if ca or cert or key else None

    def read(self) -> TlsFiles:
        """Return what the files hold now.

        Raises:
            OSError: one cannot be read.
        """
        ca, key, cert = (Path(one).read_bytes() if one else None for one in (self.ca, self.key, self.cert))
        return TlsFiles(ca, key, cert)

    def check(self) -> None:
        """Find out whether the files can be used now: gRPC would only say that nobody answers.

        Raises:
            OSError: one cannot be read.
            ValueError: one is not what it should be.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: give both, or none")
        try:
            self.read()
        except OSError as error:
            raise OSError(f"{error.filename}: {error.strerror}") from None
        for files in ({"ca": self.ca}, {"cert": self.cert, "key": self.key}):
            try:
                Tls(**files).ssl_context()
            except ssl.SSLError as error:
                names = " and ".join(str(path) for path in files.values())
                what = "certificates" if "ca" in files else "a certificate and its key"
                raise ValueError(f"{names}: not {what} in PEM ({error.reason or error})") from None

    def ssl_context(self) -> ssl.SSLContext:
        """Return the same for a client of HTTP.

        Raises:
            OSError: a file cannot be read, or is not what it should be.
        """
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        return context


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The contents of the files of a `Tls`."""

    ca: bytes | None
    key: bytes | None = field(repr=False)
    cert: bytes | None

    def channel(
        self, target: str, options: Sequence[tuple[str, Any]], name: str | None = None
    ) -> grpc.aio.Channel:
        """Return a channel to a target; `name` is whom its certificate is of, if not the target's host."""
        if name is not None:
            options = (*options, ("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(target, self.credentials(), options=options)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what a channel presents and checks by."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def tls_for(endpoint: str, tls: Tls | None) -> Tls | None:
    """Return how an endpoint is spoken to: as its scheme says, else over TLS where `tls` is given."""
    secure, _ = split_scheme(endpoint)
    if secure is None:
        return tls
    return (tls or Tls()) if secure else None
