"""Nobody waits in silence for a worker: the wait is told, and ends."""

from __future__ import annotations

import asyncio
from typing import Final, NoReturn

from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry, ServedModel
from scheduler_svc.fleet.pair import Peer
from scheduler_svc.fleet.workers import Fleet
from scheduler_svc.requests.state import RequestState

LOOK_EVERY_S: Final = 0.1
_TELL_EVERY_S: Final = 1.0
_TO_HOLDER_AFTER_S: Final = 0.25
"""A request is sent to who has the workers when one that was asked so long after it came says so: its
client may come from there, because that scheduler has just died."""


class AbsenceWatch:
    """Looks after the requests of models that have no worker here.

    When another scheduler has the workers, their clients are told where to go. When nobody has, they are told
    of the wait each second, and that there is no worker when it has lasted for `timeout_s`.
    """

    def __init__(
        self, fleet: Fleet, models: ModelRegistry, driver: CoreDriver, timeout_s: float | None
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._driver = driver
        self._timeout_s = timeout_s
        self._since: dict[str, float] = {}
        self._told_at: dict[str, float] = {}

    async def run(self) -> NoReturn:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """End or tell the waits of the moment."""
        for link in self._fleet:
            link.follow_preference()
        now = self._driver.clock()
        for model in self._models:
            if model.workers:
                self._since.pop(model.id, None)
                self._told_at.pop(model.id, None)
                continue
            since = self._since.setdefault(model.id, now)
            tells = now >= self._told_at.get(model.id, since) + _TELL_EVERY_S
            if tells:
                self._told_at[model.id] = now
            for state in self._driver.live(model.id):
                self._look_after(model, state, max(since, state.account.arrival), tells=tells)

    def taken_over(self, model: ServedModel) -> None:
        """A preferred scheduler has taken a worker: when it was the last one, its requests follow."""
        if not model.workers:
            for state in self._driver.live(model.id):
                self._driver.move(state, _no_worker(model, self._fleet.holder(model.id, 0.0)))

    def _look_after(self, model: ServedModel, state: RequestState, since: float, *, tells: bool) -> None:
        waited_s, limit_s = self._driver.clock() - since, self._timeout_s
        holder = self._fleet.holder(model.id, since + _TO_HOLDER_AFTER_S)
        if holder is not None or (limit_s is not None and waited_s >= limit_s):
            self._driver.move(state, _no_worker(model, holder))
        elif tells:
            state.tell_wait(waited_s, None if limit_s is None else limit_s - waited_s)


def _no_worker(model: ServedModel, holder: Peer | None) -> ServiceError:
    if holder is None:
        return ServiceError("NO_WORKER", f"model {model.id} has no worker any more", retry_after_s=1.0)
    return ServiceError(
        "NO_WORKER",
        f"scheduler {holder.scheduler_id} has the workers of model {model.id}",
        retry_after_s=0.0,
    ).elsewhere(holder.endpoint)
