"""From the settings of a service to what its ports and its calls are secured with."""

from __future__ import annotations

from pathlib import Path

import structlog

from octavo.service.server_tls import ServerTls
from octavo.service.settings import ServerSection, SettingsError
from octavo.service.tls import Tls
from octavo.service.worker_secret import WorkerSecret

_log = structlog.get_logger()


def server_tls(settings: ServerSection) -> ServerTls | None:
    """Return what the ports are served with, None for plaintext; says so where others can reach them.

    Raises:
        SettingsError: the files cannot be used, or one is missing.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("tls_cert and tls_key belong together: set both, or none")
    if settings.mtls and (settings.tls_cert is None or settings.tls_ca is None):
        raise SettingsError("mtls needs tls_cert, tls_key and tls_ca")
    if settings.tls_cert is None or settings.tls_key is None:
        if settings.is_reachable:
            _log.warning(
                "plaintext_beyond_loopback",
                listen=settings.listen,
                meaning="whoever is on the way can read and change what is said, keys too",
                remedy="--tls-cert and --tls-key",
            )
        return None
    try:
        return ServerTls(settings.tls_cert, settings.tls_key, settings.tls_ca if settings.mtls else None)
    except (OSError, ValueError) as error:
        raise SettingsError(f"tls_cert, tls_key or tls_ca cannot be used: {error}") from None


def client_tls(settings: ServerSection) -> Tls | None:
    """Return how services are called, None for plaintext unless an endpoint says otherwise."""
    if settings.tls_ca is None:
        return None
    return Tls(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)


def read_secret(path: Path) -> WorkerSecret:
    """Return the secret of workers.

    Raises:
        SettingsError: its file cannot be used.
    """
    try:
        return WorkerSecret(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"worker_secret_file cannot be used: {error}") from None
