"""An audit of the engine's books that harms nobody: what it finds is told, not raised."""

from __future__ import annotations

import time
from dataclasses import dataclass

from worker_svc.kv.errors import IntegrityError
from worker_svc.loop import StepEngine


@dataclass(frozen=True, slots=True)
class Audit:
    """What came of an audit."""

    violation: str | None
    """The first invariant that does not hold."""
    num_blocks: int
    check_s: float
    """For so long no step ran."""


def audit(engine: StepEngine) -> Audit:
    """Verify all books from scratch, on the engine's thread."""
    began = time.perf_counter()
    violation = None
    try:
        engine.check_integrity()
    except IntegrityError as error:
        violation = str(error)
    except Exception as error:  # noqa: BLE001 - broken books may break the audit itself
        violation = f"the audit failed: {error!r}"
    check_s = time.perf_counter() - began
    pool = engine.pool_report()
    return Audit(violation, pool.free + pool.evictable + pool.active, check_s)
