"""Pinned prefixes: which there are, and which workers have room for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from scheduler_svc.errors import ServiceError

_log: Final = structlog.get_logger()


class PinnableWorker(Protocol):
    """What pinning needs of the link to a worker."""

    @property
    def worker_id(self) -> str:
        """Names the worker."""

    @property
    def model_id(self) -> str:
        """The model that the worker serves."""

    @property
    def pin_budget_blocks(self) -> int:
        """Blocks that pins may hold on it."""

    def send_pin(self, name: str, keys: tuple[bytes, ...]) -> None:
        """Replace a pin; without keys it is lifted."""


@dataclass(slots=True)
class Pin:
    """A prefix to keep: the content keys of its full blocks."""

    model: str
    name: str
    keys: tuple[bytes, ...]
    workers: set[str] = field(default_factory=set)
    """Who was told to keep it; of those that are away, who was told last."""


@dataclass(frozen=True, slots=True)
class PinPlacement:
    """Workers that keep a pin, and those that have no room for it."""

    workers: tuple[str, ...]
    without_room: tuple[str, ...]


class PinRegistry:
    """All pins of this scheduler. A worker gets those of its model's pins that fit into its budget."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str, str], Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        """Iterate over the pins, by model and name."""
        return iter([self._pins[key] for key in sorted(self._pins)])

    def worker_ready(self, worker: PinnableWorker) -> None:
        """Tell a worker that has just been attached."""
        pins = [pin for pin in self._pins.values() if pin.model == worker.model_id]
        for pin in pins:
            pin.workers.discard(worker.worker_id)
        for pin in pins:
            self._offer(pin, worker)

    def put(self, pin: Pin, workers: Iterable[PinnableWorker]) -> PinPlacement:
        """Set a pin, replacing the one of that name, on every worker that has room for it.

        Raises:
            ServiceError: there are workers, and none has room; nothing has changed.
        """
        mine = [worker for worker in workers if worker.model_id == pin.model]
        if mine and not any(self._fits(pin, worker) for worker in mine):
            budget = max(worker.pin_budget_blocks for worker in mine)
            raise ServiceError(
                "PIN_BUDGET",
                f"the prefix takes {len(pin.keys)} blocks, and no worker has room for them beside its other "
                f"pins; the largest pin budget is {budget}",
                metadata={"blocks": str(len(pin.keys)), "budget_blocks": str(budget)},
            )
        former = self._pins.get((pin.model, pin.name))
        self._pins[pin.model, pin.name] = pin
        without_room = [worker for worker in mine if not self._offer(pin, worker)]
        for worker in without_room:
            if former is not None and worker.worker_id in former.workers:
                worker.send_pin(pin.name, ())
        self._fill(pin.model, mine)
        return PinPlacement(
            tuple(sorted(pin.workers)), tuple(sorted(worker.worker_id for worker in without_room))
        )

    def remove(self, model: str, name: str, workers: Iterable[PinnableWorker]) -> Pin:
        """Lift a pin and return it.

        Raises:
            ServiceError: there is none of that name.
        """
        pin = self._pins.pop((model, name), None)
        if pin is None:
            raise ServiceError("UNKNOWN_PIN", f"no pin {name!r} for model {model}")
        mine = [worker for worker in workers if worker.model_id == model]
        for worker in mine:
            worker.send_pin(name, ())
        self._fill(model, mine)
        return pin

    def _fill(self, model: str, workers: Iterable[PinnableWorker]) -> None:
        """Give the room that has come free to pins that had none, oldest first."""
        for worker in workers:
            for pin in self._pins.values():
                if pin.model == model and worker.worker_id not in pin.workers and self._fits(pin, worker):
                    self._offer(pin, worker)

    def _offer(self, pin: Pin, worker: PinnableWorker) -> bool:
        """Send a pin if the worker has room for it; return whether it has."""
        if not self._fits(pin, worker):
            _log.warning(
                "pin_without_room",
                name=pin.name,
                model=pin.model,
                worker_id=worker.worker_id,
                blocks=len(pin.keys),
                budget_blocks=worker.pin_budget_blocks,
            )
            return False
        pin.workers.add(worker.worker_id)
        worker.send_pin(pin.name, pin.keys)
        return True

    def _fits(self, pin: Pin, worker: PinnableWorker) -> bool:
        """Return whether a worker's budget allows a pin; a block that others pin there counts once."""
        others = (
            other.keys
            for other in self._pins.values()
            if other.model == pin.model and other.name != pin.name and worker.worker_id in other.workers
        )
        return len(frozenset(pin.keys).union(*others)) <= worker.pin_budget_blocks
