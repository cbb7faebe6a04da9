"""What the scheduler knows of one worker, and its books of what is in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.protocol.steps import DIGEST_MASK, Plan, PoolReport, Priority

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.errors import ProtocolViolationError
from scheduler_svc.core.events import WorkerInfo
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.steptime import StepTimeModel

MIN_LEAD_S = 0.001
MAX_LEAD_S = 0.050
_BUBBLE_US = 300
_MIN_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 1.0
_MAX_REFUSALS = 16
_REST_S = 0.002
"""Between two plans for a worker whose sequences all wait for blocks to come back from the host."""


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
    admitted: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Bisection:
    """The search for the culprit of a failed step: groups that still have to prove themselves."""

    groups: list[list[Sequence]]
    on_trial: list[Sequence] = field(default_factory=list)
    """The group that runs alone now."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One attached worker.

    Every sequence that the worker may know is in `sequences` by handle: running, releasing, or
    ended here while its release is on the way. `decoding` and `prefilling` hold those that run.
    """

    info: WorkerInfo
    max_num_seqs: int
    token_budget: int
    pool: PoolReport
    last_report_at: float
    sequences: dict[int, Sequence] = field(default_factory=dict)
    decoding: dict[int, Sequence] = field(default_factory=dict)
    prefilling: dict[int, Sequence] = field(default_factory=dict)
    running: list[int] = field(default_factory=lambda: [0] * (max(Priority) + 1))
    """Running sequences by class."""
    suspects: dict[int, Sequence] = field(default_factory=dict)
    """Running sequences under which another worker died; those that have proved themselves leave late."""
    growth: list[int] = field(default_factory=list)
    """growth[step % block_size]: decoding sequences that take a block in that step."""
    in_flight: deque[InFlight] = field(default_factory=deque)
    pending_seals: list[tuple[int, int, bytes]] = field(default_factory=list)
    blocks_coming: int = 0
    """Blocks of releases on their way."""
    owed: dict[int, int] = field(default_factory=dict)
    """Handles that were cancelled, each with the step whose report must have let go of it."""
    left_to_it: dict[Sequence, int] = field(default_factory=dict)
    """Waiting sequences that others left for its next plan, with the tokens it would have to compute."""
    admits_after: float = 0.0
    """After it refused sequences time and again: when it may be tried again."""
    rests_until: float = 0.0
    """Nothing it has could be computed: when it gets its next plan."""
    num_refusals: int = 0
    """Reports in a row that refused and admitted nothing."""
    step_times: StepTimeModel = field(default_factory=StepTimeModel)
    observed_s: float = 0.0
    """While it is new: seconds that its steps took,"""
    expected_s: float = 0.0
    """and those that they would have taken on a worker that is known."""
    context_tokens: int = 0
    """Tokens that the decodes of one step read."""
    active_keys: Counter[bytes] = field(default_factory=Counter)
    """Keys of blocks that are in use for certain, by the running sequences that hold them."""
    next_handle: int = 1
    next_step: int = 1
    next_plan_at: float | None = None
    lead_s: float = 0.004
    """How long before the predicted end of a step the next plan is sent."""
    prefill_cap_factor: float = 1.0
    draining: bool = False
    bisection: Bisection | None = None
    resume_after: int | None = None
    """The failed step that the next plan has to name; until then the worker skips all plans."""
    live_count: int = 0
    """The worker's live sequences by its own reports, for the audit."""
    digest: int = 0
    load: float = 0.0
    """Seconds before it could start to prefill something new; kept by the fleet."""
    last_step_s: float = 0.0
    num_steps: int = 0

    @classmethod
    def from_info(cls, info: WorkerInfo, config: CoreConfig, now: float) -> WorkerState:
        """Make the books of a worker that has just welcomed the scheduler."""
        budget = min(
            info.max_num_batched_tokens, config.max_num_batched_tokens or info.max_num_batched_tokens
        )
        return cls(
            info=info,
            # Each running sequence decodes in each step, so the budget bounds them too.
            max_num_seqs=min(info.max_num_seqs, config.max_num_seqs or info.max_num_seqs, budget),
            token_budget=budget,
            pool=info.pool,
            last_report_at=now,
            growth=[0] * info.geometry.block_size,
            draining=info.draining,
        )

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.info.worker_id

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.info.geometry.block_size

    @property
    def busy(self) -> bool:
        """It runs something."""
        return bool(self.decoding or self.prefilling)

    @property
    def num_seqs(self) -> int:
        """Sequences that hold a place in it."""
        return len(self.sequences)

    @property
    def backlog_tokens(self) -> int:
        """Prefill tokens of admitted sequences that are not computed yet."""
        return sum(
            s.num_admitted_tokens - s.num_computed_tokens - s.num_believed_tokens
            for s in self.prefilling.values()
        )

    def may_be_planned(self, now: float) -> bool:
        """Return whether it is neither left alone after refusals nor at rest."""
        return now >= self.admits_after and now >= self.rests_until

    def may_join(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run beside the others.

        One that a worker died under runs with none of its like and with none that was never tried, so
        that it is known who did it if that happens again.
        """
        for handle, other in list(self.suspects.items()):
            if not other.suspect:
                del self.suspects[handle]
        if sequence.suspect:
            return not self.suspects and not any(other.untried for other in self.prefilling.values())
        return not (self.suspects and sequence.untried)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence takes when it is admitted, if none of them is cached.

        Contiguous memory cannot grow: room for all that the sequence may become is taken at once.
        """
        if self.info.geometry.paged:
            return self.blocks_for(sequence.num_tokens + 1)
        return self.blocks_for(sequence.request.max_total_tokens)

    def blocks_won(self, sequence: Sequence) -> int:
        """Return the blocks that come free when a running sequence is released: those it shares do not."""
        if not self.info.geometry.paged:
            return self.blocks_to_admit(sequence)
        own = sequence.num_hit_blocks
        shared = sum(self.active_keys[key] > (i < own) for i, key in enumerate(sequence.keys))
        return self.blocks_for(sequence.num_tokens) - shared

    def blocks_owed(self) -> int:
        """Return the least number of blocks that come free with the cancels on their way."""
        return sum(self.blocks_won(self.sequences[handle]) for handle in self.owed)

    def growth_in(self, step: int) -> int:
        """Return the blocks that running sequences may take in a step, beyond those they hold."""
        if not self.info.geometry.paged:
            return 0
        growth = self.growth[step % self.block_size]
        if len(self.in_flight) > 1:
            # Prefills that a plan before the last one completes: their growth is not counted yet.
            growth += sum(1 for sequence in self.prefilling.values() if sequence.left_to_plan <= 0)
        return growth

    def available_blocks(self) -> int:
        """Return the blocks that no plan in flight may take; contiguous memory: in one run."""
        in_flight = sum(flight.blocks for flight in self.in_flight)
        if not self.info.geometry.paged:
            return self.pool.largest_free_run - in_flight
        return self.pool.free + self.pool.evictable - in_flight

    def admit(self, sequence: Sequence, step: int) -> None:
        """Bind a sequence to this worker, from `step` on."""
        sequence.worker = self
        sequence.handle = self.next_handle
        sequence.admitted_step = step
        sequence.num_admitted_tokens = sequence.num_tokens
        sequence.num_computed_tokens = 0
        sequence.num_planned_tokens = 0
        sequence.num_believed_tokens = 0
        sequence.growth_bucket = None
        self.next_handle += 1
        self.sequences[sequence.handle] = sequence
        self.prefilling[sequence.handle] = sequence
        self.running[sequence.request.priority] += 1
        if sequence.suspect:
            self.suspects[sequence.handle] = sequence

    def start_decoding(self, sequence: Sequence, step: int) -> None:
        """Its first token has come in `step`: from the next step on it decodes.

        With L tokens after step p it holds L - 1 computed ones; in step q it needs a new block when
        (L + q - p - 2) is a multiple of the block size.
        """
        self.prefilling.pop(sequence.handle, None)
        self.decoding[sequence.handle] = sequence
        bucket = (step + 2 - sequence.num_tokens) % self.block_size
        sequence.growth_bucket = bucket
        self.growth[bucket] += 1
        self.context_tokens += sequence.num_tokens

    def delay_growth(self, sequence: Sequence) -> None:
        """A decode sat out one step."""
        if sequence.growth_bucket is not None:
            self.growth[sequence.growth_bucket] -= 1
            sequence.growth_bucket = (sequence.growth_bucket + 1) % self.block_size
            self.growth[sequence.growth_bucket] += 1

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of what is planned; its handle stays until the worker lets go of it."""
        decoded = self.decoding.pop(sequence.handle, None) is not None
        if decoded:
            self.context_tokens -= sequence.num_tokens
        if self.prefilling.pop(sequence.handle, None) is not None or decoded:
            self.running[sequence.request.priority] -= 1
        if sequence.growth_bucket is not None:
            self.growth[sequence.growth_bucket] -= 1
            sequence.growth_bucket = None

    def cancel(self, sequence: Sequence) -> None:
        """The worker is told to drop a sequence: the report of the next plan must have let go of it."""
        self.stop(sequence)
        self.owed[sequence.handle] = self.next_step

    def hold_keys(self, sequence: Sequence, num_blocks: int) -> None:
        """The first blocks of a sequence are published: they are in use while it runs."""
        held = sequence.keys[sequence.num_hit_blocks : num_blocks]
        self.active_keys.update(held)
        sequence.num_hit_blocks += len(held)

    def decode_stalled(self, sequence: Sequence) -> None:
        """A decode got no block: it takes one in a later step, perhaps in one that is planned already."""
        self.delay_growth(sequence)
        for flight in self.in_flight:
            flight.blocks += 1

    def refused(self, now: float) -> None:
        """It took nothing of what was offered: after the first time, leave it alone for a while."""
        if self.num_refusals:
            self.admits_after = now + min(_MIN_BACKOFF_S * 2 ** (self.num_refusals - 1), _MAX_BACKOFF_S)
        self.num_refusals = min(self.num_refusals + 1, _MAX_REFUSALS)

    def rest(self, now: float) -> None:
        """All that it runs waits for a copy: steps in a hurry would only spin."""
        self.rests_until = now + _REST_S

    def active_hits(self, keys: Seq[bytes]) -> int:
        """Return how many leading keys are of blocks that are in use for certain."""
        count = 0
        for key in keys:
            if key not in self.active_keys:
                break
            count += 1
        return count

    def forget(self, sequence: Sequence) -> None:
        """The worker has let go of a sequence."""
        self.stop(sequence)
        self.sequences.pop(sequence.handle, None)
        self.suspects.pop(sequence.handle, None)
        self.owed.pop(sequence.handle, None)
        for key in sequence.keys[: sequence.num_hit_blocks]:
            if self.active_keys[key] > 1:
                self.active_keys[key] -= 1
                continue
            del self.active_keys[key]
            for flight in self.in_flight:
                # The block counts as evictable from now on, but the plan will take it back.
                flight.blocks += key in flight.shared_keys
        sequence.num_hit_blocks = 0
        sequence.worker = None

    def settle(self, step: int) -> InFlight:
        """Return the plan that a report answers.

        Raises:
            ProtocolViolationError: the report is not the one that is due.
        """
        if not self.in_flight or self.in_flight[0].plan.step != step:
            due = self.in_flight[0].plan.step if self.in_flight else None
            raise ProtocolViolationError(f"report of step {step}, due is {due}")
        flight = self.in_flight.popleft()
        self.blocks_coming -= flight.blocks_coming
        for handle, tokens in flight.plan.prefill:
            sequence = self.sequences.get(handle)
            if sequence is not None:
                sequence.num_planned_tokens -= tokens
        return flight

    def count_admitted(self, handle: int, length: int) -> None:
        """The worker reports that it has taken a sequence."""
        self.live_count += 1
        self.digest = (self.digest + handle * length) & DIGEST_MASK

    def count_gone(self, handle: int, length: int) -> None:
        """The worker reports that it has let go of a sequence."""
        self.live_count -= 1
        self.digest = (self.digest - handle * length) & DIGEST_MASK

    def adapt_lead(self, bubble_us: int) -> None:
        """Send earlier after the device waited for a plan, else a little later each time."""
        if bubble_us > _BUBBLE_US:
            self.lead_s = min(MAX_LEAD_S, self.lead_s * 1.5 + bubble_us * 5e-7)
        else:
            self.lead_s = max(MIN_LEAD_S, self.lead_s * 0.99)

    def ends_at(self) -> float:
        """Return when the plans in flight are expected to have run."""
        if not self.in_flight:
            return 0.0
        began = max(self.last_report_at, self.in_flight[0].sent_at)
        return began + sum(map(self.predict_flight_s, self.in_flight))

    def predict_flight_s(self, flight: InFlight) -> float:
        """Return how long a plan in flight is expected to run."""
        return self.step_times.predict(flight.decodes, flight.prefill_tokens, self.context_tokens)
