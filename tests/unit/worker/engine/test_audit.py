"""An audit tells what it finds and lets the engine live."""

from __future__ import annotations

from octavo.protocol.steps import PoolReport

from worker_svc.engine.audit import audit
from worker_svc.engine.loop import StepEngine
from worker_svc.kv.errors import IntegrityError


class Books(StepEngine):
    """An engine whose books are as the test says."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def check_integrity(self) -> None:
        if self._error is not None:
            raise self._error

    def pool_report(self) -> PoolReport:
        return PoolReport(free=5, evictable=3, active=2)


def test_books_in_order_have_no_violation() -> None:
    found = audit(Books(None))
    assert (found.violation, found.num_blocks) == (None, 10)
    assert found.check_s >= 0


def test_broken_invariant_is_told_by_name() -> None:
    found = audit(Books(IntegrityError("free + active == total", "9 of 10")))
    assert found.violation == "free + active == total: 9 of 10"


def test_books_so_broken_that_the_audit_fails_are_a_violation_too() -> None:
    found = audit(Books(KeyError("lost")))
    assert found.violation == "the audit failed: KeyError('lost')"
