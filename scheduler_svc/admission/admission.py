"""Admission: the way of a request from its message to the core, for Generate and Session alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import structlog
from octavo.keys import Tenant
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.input_processor import InputProcessor
from scheduler_svc.admission.load import IncomingRequest, LoadGate
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.requests.accounts import Accounts, RequestAccount
from scheduler_svc.requests.messages import generate_from_proto
from scheduler_svc.requests.outbox import ClientStream
from scheduler_svc.requests.state import RequestState
from scheduler_svc.requests.tenants import Tenants

_log = structlog.get_logger()


class Admission:
    """Turns messages into requests of the core, each with an account that ends whatever happens."""

    def __init__(
        self,
        access: Access,
        tenants: Tenants,
        gate: LoadGate,
        inputs: InputProcessor,
        driver: CoreDriver,
        accounts: Accounts,
    ) -> None:
        self._access = access
        self._tenants = tenants
        self._gate = gate
        self._inputs = inputs
        self._driver = driver
        self._accounts = accounts
        self._numbers = itertools.count(1)

    def open(self, stream: ClientStream) -> RequestAccount:
        """Account for an arrival."""
        return self._accounts.open(stream.transport)

    def max_requests(self, stream: ClientStream) -> int | None:
        """Return how many requests the call's own tenant may have at once; None is without limit."""
        return self._access.max_requests(stream.api_key)

    def receive(self, message: pb.GenerateRequest, stream: ClientStream) -> IncomingRequest:
        """Return what can be known of a request at once: whose it is, and about how large."""
        caller: Tenant | ServiceError
        try:
            caller = self._access.authenticate(
                message.api_key if message.HasField("api_key") else stream.api_key
            )
        except ServiceError as error:
            caller = error
        return self._gate.receive(message, stream, caller)

    def refuse_at_once(self, incoming: IncomingRequest) -> ServiceError | None:
        """Account for a request that there is no room for, and return why; None when there is room.

        There is none when its tenant is over a quota, or for the load. One whose key is no good is let
        through, to be told that.
        """
        tenant, stream, now = incoming.caller, incoming.stream, self._accounts.clock()
        if isinstance(tenant, ServiceError):
            return None
        state = self._tenants.state(tenant, now)
        error = state.refusal(incoming.estimate, now, paced=stream.paced)
        if error is not None:
            state.count_refusal(error)
        else:
            error = self._gate.refusal(incoming, now)
        if error is not None:
            priority = incoming.message.terms.priority
            self._accounts.refused(stream.transport, priority, tenant.name, error.reason)
        return error

    async def start(
        self,
        incoming: IncomingRequest,
        account: RequestAccount,
        on_end: Callable[[], None] | None = None,
    ) -> RequestState:
        """Hand a request to the core.

        Raises:
            ServiceError: it is wrong or cannot be taken; the account is closed.
        """
        pending = self._gate.enter(incoming)
        try:
            account.request_id = incoming.message.request_id
            tenant, stream = incoming.tenant, incoming.stream
            account.tenant = tenant.name
            call = generate_from_proto(incoming.message)
            account.request_id = call.request_id
            quotas = self._tenants.state(tenant, account.arrival)
            account.lease = quotas.take(incoming.estimate, account.arrival, paced=stream.paced)
            core_id = f"{call.request_id}#{next(self._numbers)}"
            prepared = await self._inputs.prepare(call, core_id, incoming, account.arrival)
            state = RequestState(prepared, stream.outbox, account)
            await state.resume()
        except ServiceError as error:
            pending.close()
            account.end(error.reason)
            raise
        except Exception:  # noqa: BLE001 - logged
            _log.exception("admission_failed", request_id=account.request_id)
            pending.close()
            account.end("INTERNAL")
            raise ServiceError("INTERNAL", "the scheduler failed to take the request") from None
        except BaseException:
            pending.close()
            account.end("SLOW_CONSUMER" if incoming.stream.outbox.cut else "CANCELLED")
            raise
        trimmed_tokens = prepared.trimmed_tokens
        pending.learn(len(prepared.request.prompt_token_ids) + trimmed_tokens)
        state.on_submit = pending.close
        state.on_end = on_end
        account.admitted(prepared.request, trimmed_tokens, clamped=prepared.clamped_max_tokens is not None)
        self._driver.submit(state)
        return state
