"""The workers of this scheduler: who they are, and a link to each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Iterator
from typing import Final

import structlog
from octavo.service.address import split_scheme

from scheduler_svc.fleet.pair import Peer
from scheduler_svc.fleet.way import Way
from scheduler_svc.fleet.worker_link import LinkContext, WorkerLink

_log = structlog.get_logger()

DNS_PREFIX: Final = "dns:"
_RESOLVE_EVERY_S: Final = 5.0


class Fleet:
    """Keeps a link to every worker: those listed, and those that a DNS name resolves to."""

    def __init__(self, targets: Iterable[str], context: LinkContext) -> None:
        self._targets = tuple(targets)
        self._context = context
        self._links: dict[str, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._resolvers: list[asyncio.Task[None]] = []
        self._unresolved: set[str] = set()
        """DNS names that have not been looked up yet."""

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter([link for link, _ in self._links.values()])

    def start(self) -> None:
        """Begin to attach."""
        for target in self._targets:
            _, place = split_scheme(target)
            if place.startswith(DNS_PREFIX):
                name = place.removeprefix(DNS_PREFIX)
                self._unresolved.add(name)
                self._resolvers.append(asyncio.create_task(self._follow(target, name)))
            else:
                self._add(self._context.ways.to(target))

    async def close(self) -> None:
        """Detach from all."""
        tasks = [*self._resolvers, *(task for _, task in self._links.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Detach from all on purpose, so that another scheduler has them at once."""
        await asyncio.gather(*(link.leave() for link in self))

    def holder(self, model: str, since: float) -> Peer | None:
        """Return a scheduler that has a worker of a model, by a worker that was asked after `since`."""
        for link in self:
            status = link.status
            if status.model == model and status.held_by is not None and status.asked_at >= since:
                return status.held_by
        return None

    def find(self, worker_id: str) -> WorkerLink | None:
        """Return the link to an attached worker."""
        return self._context.worker_ids.get(worker_id)

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return sum(link.status.state == "ready" for link in self)

    @property
    def is_tried(self) -> bool:
        """Whether an attempt to attach to each worker has succeeded or failed."""
        return not self._unresolved and all(link.tried for link in self)

    def _add(self, way: Way) -> None:
        link = WorkerLink(way, self._context)
        self._links[way.address] = (link, asyncio.create_task(link.run()))

    async def _remove(self, address: str) -> None:
        _, task = self._links.pop(address)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _follow(self, target: str, name: str) -> None:
        """Have a link to each address of a name, as it changes."""
        mine: set[str] = set()
        while True:
            found = await _resolve(name)
            if found is not None:
                for address in sorted(found - mine):
                    self._add(self._context.ways.to(target, address))
                # An address that is gone from DNS but attached still works, or will end by itself.
                gone = {address for address in mine - found if not self._links[address][0].attached}
                for address in gone:
                    await self._remove(address)
                mine = (mine | found) - gone
            self._unresolved.discard(name)
            await asyncio.sleep(_RESOLVE_EVERY_S)


async def _resolve(name: str) -> set[str] | None:
    """Return the addresses of host:port, or None when the name cannot be looked up now."""
    host, _, port = name.rpartition(":")
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("worker_lookup_failed", name=name, problem=str(error))
        return None
    return {_join(entry[4][0], entry[4][1]) for entry in entries}


def _join(host: object, port: object) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
