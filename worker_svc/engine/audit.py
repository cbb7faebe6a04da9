"""An audit of the engine's books that harms nobody: what it finds is told, not raised."""

from __future__ import annotations

import time
from dataclasses import dataclass

from worker_svc.engine.loop import StepEngine
from worker_svc.kv.errors import IntegrityError


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
    violation, num_blocks = None, 0
    try:
        pool = engine.pool_report()
        num_blocks = pool.free + pool.evictable + pool.active
        engine.check_integrity()
    except IntegrityError as error:
        violation = str(error)
    except Exception as error:  # noqa: BLE001 - broken books may break the audit itself
        violation = f"the audit failed: {error!r}"
    return Audit(violation, num_blocks, time.perf_counter() - began)
