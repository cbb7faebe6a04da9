"""Who calls: from the key that a call or a request carries to a tenant, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from octavo.keys import Key, KeyFile, Role, Tenant
from octavo.service.address import is_loopback
from octavo.service.call_guard import Metadata, bearer_key
from octavo.v1 import generation_pb2, operations_pb2

from scheduler_svc.admission.tokens import Tokens
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics

GENERATION: Final = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
OPERATIONS: Final = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
ANONYMOUS: Final = Tenant("anonymous")
"""Everybody's tenant where there is no key file."""

# Probes have no key. What is not named here is for operators.
_OPEN: Final = frozenset({health.SERVICE_NAME})
_ANY_KEY: Final = frozenset({GENERATION, reflection.SERVICE_NAME})
_FIGURES: Final = frozenset({f"/{OPERATIONS}/GetStatus", f"/{OPERATIONS}/WatchStatus"})


class Access:
    """Authenticates keys. Without a key file everybody is the anonymous tenant, and operators are local.

    Refusals are counted.
    """

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self.key_file: KeyFile | None = None
        """The one in force; replaced as a whole."""
        self.tokens: Tokens | None = None
        """Takes tokens of others for keys of its tenants."""

    def authenticate(self, key: str | None, role: Role | None = Role.INFERENCE) -> Tenant:
        """Return the tenant in whose name a request with this key runs. Without a role any key will do.

        Raises:
            ServiceError: there is no key, it is not known, or lacks the role.
        """
        if self.key_file is None:
            return ANONYMOUS
        return self._find(self.key_file, key, role).tenant

    def max_requests(self, key: str | None) -> int | None:
        """Return how many requests the tenant of a key may have at once; None is without limit."""
        if self.key_file is None or key is None:
            return None
        found = self._look_up(self.key_file, key)
        return found.tenant.quotas.requests_in_flight if found is not None else None

    def authorize(self, method: str, metadata: Metadata | None) -> str | None:
        """Refuse a call that its key does not allow, and return the tenant of one that may come.

        None is whoever needs no key. `method` is `/package.Service/Method`.

        Raises:
            ServiceError: there is no key, it is not known, or lacks the role.
        """
        service = method.split("/")[1] if method.count("/") == 2 else ""
        if self.key_file is None or service in _OPEN:
            return None
        role = None if service in _ANY_KEY else Role.METRICS if method in _FIGURES else Role.OPERATOR
        return self._find(self.key_file, bearer_key(metadata), role).tenant.name

    def metrics_refusal(self, key: str | None) -> HTTPStatus | None:
        """Return why somebody with this key may not see the metrics of the scheduler, None when they may."""
        if self.key_file is None:
            return None
        try:
            self._find(self.key_file, key, Role.METRICS)
        except ServiceError as refused:
            role_is_missing = refused.reason == "ROLE_REQUIRED"
            return HTTPStatus.FORBIDDEN if role_is_missing else HTTPStatus.UNAUTHORIZED
        return None

    def id_of(self, key: str | None) -> str | None:
        """Return what names a key in logs, None for none, or one that is not known."""
        found = self._look_up(self.key_file, key) if self.key_file is not None and key is not None else None
        return found.id if found is not None else None

    def check_peer(self, peer: str) -> None:
        """Refuse an operation to a caller on another machine where there are no keys to tell operators by.

        `peer` is as gRPC writes it.

        Raises:
            ServiceError: the caller is not on this machine.
        """
        kind, _, address = unquote(peer).partition(":")
        if self.key_file is not None or kind.startswith("unix"):
            return
        if not is_loopback(address.rpartition(":")[0].strip("[]")):
            raise self._refuse(
                "LOOPBACK_REQUIRED",
                "without API keys, only callers on the scheduler's own machine may do this, and "
                f"{unquote(peer)} is not one: call its loopback address on that machine, or start the "
                "scheduler with --key-file and use an operator's key",
            )

    def tenant_named(self, name: str) -> Tenant | None:
        """Return a tenant by name."""
        if self.key_file is None:
            return ANONYMOUS if name == ANONYMOUS.name else None
        return self.key_file.tenants.get(name)

    def _find(self, key_file: KeyFile, key: str | None, role: Role | None) -> Key:
        if key is None:
            raise self._refuse("NO_API_KEY", "an API key is needed, as metadata `authorization: Bearer KEY`")
        found = self._look_up(key_file, key)
        if found is None:
            raise self._refuse("BAD_API_KEY", "the API key is not known here")
        if role is not None and not found.has(role):
            problem = f"the key {found.id} does not have the role {role}"
            raise self._refuse("ROLE_REQUIRED", problem, {"key": found.id, "role": str(role)})
        return found

    def _look_up(self, key_file: KeyFile, key: str) -> Key | None:
        found = key_file.find(key)
        return found if found or self.tokens is None else self.tokens.find(key, key_file.tenants)

    def _refuse(
        self, reason: str, message: str, metadata: Mapping[str, str] = MappingProxyType({})
    ) -> ServiceError:
        self._metrics.access_refusals.labels(reason).inc()
        return ServiceError(reason, message, metadata=metadata)
