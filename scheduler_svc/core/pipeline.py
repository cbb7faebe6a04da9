"""The plans of one worker: those in flight, and what the next one has to say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from octavo.protocol.steps import Plan

from scheduler_svc.core.request import Sequence

MIN_LEAD_S = 0.001
MAX_LEAD_S = 0.050
_BUBBLE_US = 300


@dataclass(slots=True)
class InFlight:
    """A plan that has not been answered."""

    plan: Plan
    sent_at: float
    blocks: int
    """Blocks that it takes at most, next to those it shares."""
    shared_keys: set[bytes]
    """Keys of active blocks that its admissions are to share."""
    blocks_coming: int
    """Blocks that its releases give back."""
    decodes: int
    prefill_tokens: int
    prefill_pairs: float
    """Pairs of query and key that the attention of its prefill has."""
    admitted: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Bisection:
    """The search for the culprit of a failed step: groups that still have to prove themselves."""

    groups: list[list[Sequence]]
    on_trial: list[Sequence] = field(default_factory=list)
    """The group that runs alone now."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """What was sent to a worker and when the next plan is due."""

    last_report_at: float
    in_flight: deque[InFlight] = field(default_factory=deque)
    next_step: int = 1
    next_plan_at: float | None = None
    lead_s: float = 0.004
    """How long before the predicted end of a step the next plan is sent."""
    pending_seals: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Handle, block index and key of full blocks that the next plan has published."""
    resume_after: int | None = None
    """The failed step that the next plan has to name; until then the worker skips all plans."""
    bisection: Bisection | None = None

    def has_room(self, window: int) -> bool:
        """Return whether one more plan may be outstanding; one by one while a culprit is searched for."""
        if self.bisection is not None or self.resume_after is not None:
            return not self.in_flight
        return len(self.in_flight) < window

    def adapt_lead(self, bubble_us: int) -> None:
        """Send earlier after the device waited for a plan, else a little later each time."""
        if bubble_us > _BUBBLE_US:
            self.lead_s = min(MAX_LEAD_S, self.lead_s * 1.5 + bubble_us * 5e-7)
        else:
            self.lead_s = max(MIN_LEAD_S, self.lead_s * 0.99)
