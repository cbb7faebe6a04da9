"""Pinned prefixes: which there are, and telling every worker of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.errors import ServiceError


class PinPort(Protocol):
    """What pinning needs of the link to a worker."""

    @property
    def model_id(self) -> str:
        """The model that the worker serves."""

    @property
    def pin_budget_blocks(self) -> int:
        """Blocks that pins may hold on it."""

    def send_pin(self, name: str, keys: tuple[bytes, ...]) -> None:
        """Replace a pin; without keys it is lifted."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix to keep: the content keys of its full blocks."""

    model: str
    name: str
    keys: tuple[bytes, ...]


class PinBoard:
    """All pins of this scheduler. A worker gets its model's pins whenever it is attached."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str, str], Pin] = {}

    def welcome(self, port: PinPort) -> None:
        """Tell a worker that has just been attached."""
        for pin in self._of(port.model_id):
            port.send_pin(pin.name, pin.keys)

    def put(self, pin: Pin, ports: list[PinPort]) -> int:
        """Set a pin, replacing the one of that name; return the workers that were told.

        Raises:
            ServiceError: some worker may not hold that much.
        """
        mine = [port for port in ports if port.model_id == pin.model]
        others = sum(len(other.keys) for other in self._of(pin.model) if other.name != pin.name)
        budget = min((port.pin_budget_blocks for port in mine), default=None)
        if budget is not None and others + len(pin.keys) > budget:
            raise ServiceError(
                "PIN_BUDGET",
                f"the prefix takes {len(pin.keys)} blocks, other pins hold {others}, "
                f"and workers may pin {budget}",
                metadata={"blocks": str(len(pin.keys)), "budget_blocks": str(budget)},
            )
        self._pins[pin.model, pin.name] = pin
        for port in mine:
            port.send_pin(pin.name, pin.keys)
        return len(mine)

    def remove(self, model: str, name: str, ports: list[PinPort]) -> Pin:
        """Lift a pin and return it.

        Raises:
            ServiceError: there is none of that name.
        """
        pin = self._pins.pop((model, name), None)
        if pin is None:
            raise ServiceError("UNKNOWN_PIN", f"no pin {name!r} for model {model}")
        for port in ports:
            if port.model_id == model:
                port.send_pin(name, ())
        return pin

    def _of(self, model: str) -> Iterator[Pin]:
        return (pin for pin in self._pins.values() if pin.model == model)
