"""Taking requests in: what Generate and Session share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from octavo.keys import Tenant
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.admission import Admission, Arrival
from scheduler_svc.admission.tenants import Estimate, Tenants
from scheduler_svc.api.convert import generate_from_proto
from scheduler_svc.driver import Driver
from scheduler_svc.errors import ServiceError
from scheduler_svc.live.accounts import Accounts, RequestRecord
from scheduler_svc.live.outbox import Outbox
from scheduler_svc.live.requests import LiveRequest

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stream:
    """What all requests of one stream share."""

    outbox: Outbox
    transport: str
    rpc_deadline: float | None
    key: str | None = field(repr=False)
    """The call's own API key, for the requests that bring none."""
    paced: bool = False


class Intake:
    """Turns messages into live requests, each with an account that ends whatever happens."""

    def __init__(
        self, access: Access, tenants: Tenants, admission: Admission, driver: Driver, accounts: Accounts
    ) -> None:
        self._access = access
        self._tenants = tenants
        self._admission = admission
        self._gate = admission.gate
        self._driver = driver
        self._accounts = accounts
        self._numbers = itertools.count(1)

    def open(self, stream: Stream) -> RequestRecord:
        """Account for an arrival."""
        return self._accounts.open(stream.transport)

    def most_live(self, stream: Stream) -> int | None:
        """Return how many requests the call's own tenant may have at once; None is without limit."""
        return self._access.most_live(stream.key)

    def refuse_at_once(self, message: pb.GenerateRequest, stream: Stream) -> ServiceError | None:
        """Return why there is no room for an arrival, which is then accounted for, or None.

        There is none when its tenant is over a quota, or for the load. One whose key is no good is let
        through, to be told that.
        """
        try:
            tenant = self._tenant(message, stream)
        except ServiceError:
            return None
        now = self._accounts.clock()
        state = self._tenants.state(tenant, now)
        error = state.refusal(Estimate.of(message), now, paced=stream.paced)
        if error is None:
            error = self._gate.refusal(message, now, tenant=tenant.name, paced=stream.paced)
        if error is not None:
            self._accounts.refused(stream.transport, message.terms.priority, tenant.name, error.reason)
        return error

    async def start(
        self,
        message: pb.GenerateRequest,
        stream: Stream,
        record: RequestRecord,
        on_end: Callable[[], None] | None = None,
    ) -> LiveRequest:
        """Hand a request to the core.

        Raises:
            ServiceError: it is wrong or cannot be taken; the account is closed.
        """
        pending = self._gate.enter(message)
        try:
            record.request_id = message.request_id
            tenant = self._tenant(message, stream)
            record.tenant = tenant.name
            call = generate_from_proto(message)
            record.request_id = call.request_id
            state = self._tenants.state(tenant, record.arrival)
            record.seat = state.take(Estimate.of(message), record.arrival, paced=stream.paced)
            arrival = Arrival(
                core_id=f"{call.request_id}#{next(self._numbers)}",
                at=record.arrival,
                rpc_deadline=stream.rpc_deadline,
                tenant=tenant.name,
                paced=stream.paced,
            )
            admitted = await self._admission.admit(call, arrival)
            live = LiveRequest(call, admitted, stream.outbox, record)
            await live.resume()
        except ServiceError as error:
            pending.close()
            record.end(error.reason)
            raise
        except Exception:  # noqa: BLE001 - logged
            _log.exception("admission_failed", request_id=record.request_id)
            pending.close()
            record.end("INTERNAL")
            raise ServiceError("INTERNAL", "the scheduler failed to take the request") from None
        except BaseException:
            pending.close()
            record.end("SLOW_CONSUMER" if stream.outbox.cut else "CANCELLED")
            raise
        pending.learn(len(admitted.request.prompt_token_ids) + admitted.trimmed_tokens)
        live.arrived = pending.close
        live.on_end = on_end
        record.admitted(admitted)
        self._driver.submit(live)
        return live

    def _tenant(self, message: pb.GenerateRequest, stream: Stream) -> Tenant:
        """Return whose request it is; raises ServiceError when its key is no good."""
        key = message.api_key if message.HasField("api_key") else stream.key
        return self._access.tenant(key)
