"""Which workers keep which pins, and what the scheduler says of it."""

from __future__ import annotations

import pytest

from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.pins import Pin, PinPlacement, PinRegistry


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "little") for number in numbers)


class Worker:
    """A worker that takes what it is told, and notices when that is too much."""

    def __init__(self, worker_id: str, budget: int, model: str = "m") -> None:
        self.worker_id = worker_id
        self.model_id = model
        self.pin_budget_blocks = budget
        self.pins: dict[str, tuple[bytes, ...]] = {}

    def send_pin(self, name: str, keys: tuple[bytes, ...]) -> None:
        self.pins.pop(name, None)
        if keys:
            self.pins[name] = keys
        assert len(frozenset().union(*self.pins.values())) <= self.pin_budget_blocks


def names(registry: PinRegistry) -> dict[str, set[str]]:
    return {pin.name: pin.workers for pin in registry}


def test_blocks_that_two_pins_share_count_once() -> None:
    registry, worker = PinRegistry(), Worker("w1", 6)
    registry.put(Pin("m", "one", keys(1, 2, 3, 4)), [worker])

    assert registry.put(Pin("m", "two", keys(1, 2, 3, 5, 6)), [worker]) == PinPlacement(("w1",), ())
    assert set(worker.pins) == {"one", "two"}


def test_worker_without_room_is_named_and_not_told() -> None:
    registry, large, small, contiguous = PinRegistry(), Worker("w1", 8), Worker("w2", 3), Worker("w3", 0)

    placement = registry.put(Pin("m", "one", keys(1, 2, 3, 4)), [small, contiguous, large])

    assert placement == PinPlacement(("w1",), ("w2", "w3"))
    assert (set(large.pins), small.pins, contiguous.pins) == ({"one"}, {}, {})
    assert names(registry) == {"one": {"w1"}}


def test_pin_that_nobody_has_room_for_is_refused_and_changes_nothing() -> None:
    registry, worker = PinRegistry(), Worker("w1", 4)
    registry.put(Pin("m", "one", keys(1, 2)), [worker])

    with pytest.raises(ServiceError) as caught:
        registry.put(Pin("m", "one", keys(1, 2, 3, 4, 5)), [worker])

    assert caught.value.reason == "PIN_BUDGET"
    assert [pin.keys for pin in registry] == [keys(1, 2)]
    assert worker.pins == {"one": keys(1, 2)}


def test_replacement_is_lifted_where_only_the_former_had_room() -> None:
    registry, large, small = PinRegistry(), Worker("w1", 8), Worker("w2", 2)
    registry.put(Pin("m", "one", keys(1, 2)), [large, small])

    placement = registry.put(Pin("m", "one", keys(3, 4, 5)), [large, small])

    assert placement == PinPlacement(("w1",), ("w2",))
    assert (large.pins, small.pins) == ({"one": keys(3, 4, 5)}, {})


def test_worker_that_attaches_later_gets_the_pins_that_fit() -> None:
    registry = PinRegistry()
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        registry.put(Pin("m", name, keys(*range(first, first + (4 if name == "b" else 2)))), [])
    registry.put(Pin("other", "d", keys(1)), [])
    worker = Worker("w1", 4)

    registry.worker_ready(worker)

    assert set(worker.pins) == {"a", "c"}
    assert names(registry) == {"a": {"w1"}, "b": set(), "c": {"w1"}, "d": set()}


def test_worker_that_comes_back_with_a_smaller_budget_keeps_less() -> None:
    registry = PinRegistry()
    registry.put(Pin("m", "one", keys(1, 2, 3)), [Worker("w1", 4)])

    registry.worker_ready(Worker("w1", 2))

    assert names(registry) == {"one": set()}


def test_room_that_comes_free_is_given_to_the_pins_that_had_none() -> None:
    registry, large, small = PinRegistry(), Worker("w1", 9), Worker("w2", 3)
    registry.put(Pin("m", "a", keys(1, 2, 3)), [large, small])
    registry.put(Pin("m", "b", keys(4, 5)), [large, small])
    registry.put(Pin("m", "c", keys(6)), [large, small])
    assert names(registry) == {"a": {"w1", "w2"}, "b": {"w1"}, "c": {"w1"}}

    registry.put(Pin("m", "a", keys(1)), [large, small])
    assert small.pins == {"a": keys(1), "b": keys(4, 5)}
    registry.remove("m", "b", [large, small])
    assert small.pins == {"a": keys(1), "c": keys(6)}
    assert names(registry) == {"a": {"w1", "w2"}, "c": {"w1", "w2"}}


def test_lifted_pin_makes_room_for_another() -> None:
    registry, worker = PinRegistry(), Worker("w1", 2)
    registry.put(Pin("m", "one", keys(1, 2)), [worker])
    assert registry.remove("m", "one", [worker]).keys == keys(1, 2)

    assert registry.put(Pin("m", "two", keys(3, 4)), [worker]) == PinPlacement(("w1",), ())
