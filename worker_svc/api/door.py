"""Who may come in at the worker's ports: who has the secret or a scheduler's certificate, and else nobody."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health
from octavo.keys import KeyFile, KeyFileError, Role
from octavo.service.call_guard import CallRefused, Metadata, bearer_key
from octavo.service.followed import Followed
from octavo.service.status import Context
from octavo.service.worker_secret import WorkerSecret
from octavo.v1 import common_pb2

_NAMES: Final = ("x509_subject_alternative_name", "x509_common_name")


class Door:
    """Refuses every call but those of health checks before a message of it is read."""

    def __init__(self, secret: WorkerSecret | None = None, names: Collection[str] = ()) -> None:
        """`names`: one of them must be in the certificate of a caller, where there is no secret."""
        self._secret = secret
        self._names = frozenset(name.encode() for name in names)

    def identify(self, method: str, metadata: Metadata | None, context: Context) -> str | None:
        """Let a call in; raises CallRefused. All who may come in are told apart by their addresses."""
        if method.split("/")[1] == health.SERVICE_NAME:
            return None
        if self._secret is not None:
            if not self._secret.accepts(bearer_key(metadata)):
                raise _refused("NO_WORKER_SECRET", "this port wants the secret of its schedulers")
        elif self._names:
            # The stubs lag: it maps names to sequences of bytes.
            facts = context.auth_context() or {}
            if not any(name in self._names for key in _NAMES for name in facts.get(key, ())):
                raise _refused("NOT_A_SCHEDULER", "this port wants the certificate of a scheduler")
        return None


class MetricsDoor:
    """Lets those see the metrics whose key in a file, the schedulers' own, is one for them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError when the file cannot be used."""
        self._keys = Followed([path], _parse, secret=path)

    def refusal(self, key: str | None) -> HTTPStatus | None:
        """Return why somebody with this key may not see them, None when they may."""
        found = self._keys.get().find(key or "")
        if found is None:
            return HTTPStatus.UNAUTHORIZED
        return None if found.has(Role.METRICS) else HTTPStatus.FORBIDDEN


def _parse(contents: tuple[bytes, ...]) -> KeyFile:
    try:
        return KeyFile.parse(contents[0].decode())
    except KeyFileError as error:
        raise ValueError(str(error)) from None


def _refused(reason: str, message: str) -> CallRefused:
    code: int = grpc.StatusCode.UNAUTHENTICATED.value[0]
    return CallRefused(common_pb2.Error(code=code, reason=reason, message=message))
