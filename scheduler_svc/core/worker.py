"""What the scheduler knows of one worker: its limits, and the books of what it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.protocol.steps import DIGEST_MASK, Priority

from scheduler_svc.core.blocks import BlockLedger
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.errors import ProtocolViolationError
from scheduler_svc.core.events import WorkerInfo
from scheduler_svc.core.pipeline import InFlight, Pipeline
from scheduler_svc.core.request import Binding, Deaths, Sequence
from scheduler_svc.core.steptime import StepTimeModel

_MIN_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 1.0
_MAX_REFUSALS = 16
_FADE = 1.001
"""What a step costs at least rises by so much with each that costs more."""
_REST_S = 0.002
"""Between two plans for a worker whose sequences all wait for blocks to come back from the host."""


@dataclass(slots=True, eq=False)
class Pace:
    """How fast a worker is, by its reports."""

    step_times: StepTimeModel = field(default_factory=StepTimeModel)
    observed_s: float = 0.0
    """While it is new: seconds that its steps took,"""
    expected_s: float = 0.0
    """and those that they would have taken on a worker that is known."""
    last_step_s: float = 0.0
    least_step_s: float = math.inf
    """The shortest step of late: what any step costs, whatever is in it."""
    num_steps: int = 0
    prefill_cap_factor: float = 1.0
    """Latency-critical mode: correction of the prefill that the step times say fits."""
    load: float = 0.0
    """Seconds before it could start to prefill something new; kept by the fleet."""

    def took(self, seconds: float) -> None:
        """A step took so long."""
        self.last_step_s = seconds
        self.least_step_s = min(self.least_step_s * _FADE, seconds)


@dataclass(slots=True, eq=False)
class Backoff:
    """When a worker may be offered something again."""

    admits_after: float = 0.0
    """After it refused sequences time and again: when it may be tried again."""
    rests_until: float = 0.0
    """Nothing it has could be computed: when it gets its next plan."""
    num_refusals: int = 0
    """Reports in a row that refused and admitted nothing."""

    def is_over(self, now: float) -> bool:
        """Return whether it is neither left alone after refusals nor at rest."""
        return now >= self.admits_after and now >= self.rests_until

    def refused(self, now: float) -> None:
        """It took nothing of what was offered: after the first time, leave it alone for a while."""
        if self.num_refusals:
            self.admits_after = now + min(_MIN_BACKOFF_S * 2 ** (self.num_refusals - 1), _MAX_BACKOFF_S)
        self.num_refusals = min(self.num_refusals + 1, _MAX_REFUSALS)

    def rest(self, now: float) -> None:
        """All that it runs waits for a copy: steps in a hurry would only spin."""
        self.rests_until = now + _REST_S


@dataclass(slots=True, eq=False)
class LiveDigest:
    """The worker's live sequences as its reports add up, to be compared with what it says of them."""

    count: int = 0
    digest: int = 0

    def admitted(self, handle: int, length: int) -> None:
        """The worker reports that it has taken a sequence."""
        self.count += 1
        self.add(handle * length)

    def gone(self, handle: int, length: int) -> None:
        """The worker reports that it has let go of a sequence."""
        self.count -= 1
        self.add(-handle * length)

    def add(self, change: int) -> None:
        """Add handles times tokens."""
        self.digest = (self.digest + change) & DIGEST_MASK


@dataclass(slots=True, eq=False)
class TenantLoad:
    """What a tenant has in each step of a worker."""

    decodes: int = 0
    context_tokens: int = 0
    """Tokens that these read."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One attached worker.

    Every sequence that the worker may know is in `sequences` by handle: running, releasing, or
    ended here while its release is on the way. `decoding` and `prefilling` hold those that run.
    """

    info: WorkerInfo
    max_num_seqs: int
    token_budget: int
    blocks: BlockLedger
    pipeline: Pipeline
    pace: Pace = field(default_factory=Pace)
    backoff: Backoff = field(default_factory=Backoff)
    live: LiveDigest = field(default_factory=LiveDigest)
    draining: bool = False
    moves_at: float = math.inf
    """Draining: from then on what it runs is moved to others."""
    next_handle: int = 1
    sequences: dict[int, Sequence] = field(default_factory=dict)
    decoding: dict[int, Sequence] = field(default_factory=dict)
    prefilling: dict[int, Sequence] = field(default_factory=dict)
    running: list[int] = field(default_factory=lambda: [0] * (max(Priority) + 1))
    """Running sequences by class."""
    suspects: dict[int, Sequence] = field(default_factory=dict)
    """Its sequences that are on trial: another worker died under them."""
    cancelled: dict[int, int] = field(default_factory=dict)
    """Handles that were cancelled, each with the step whose report must have let go of it."""
    deferred: dict[Sequence, int] = field(default_factory=dict)
    """Waiting sequences that others left for its next plan, with the tokens it would have to compute."""
    context_tokens: int = 0
    """Tokens that the decodes of one step read."""
    loads: dict[str, TenantLoad] = field(default_factory=dict)
    """The same by tenant, of those that have any."""

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
            blocks=BlockLedger(info.geometry, info.pool, growth=[0] * info.geometry.block_size),
            pipeline=Pipeline(last_report_at=now),
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
        if not self.prefilling:
            return 0
        bindings = [sequence.binding for sequence in self.prefilling.values()]
        return sum(b.num_admitted_tokens - b.num_computed_tokens - b.num_believed_tokens for b in bindings)

    def prefills_left(self) -> list[tuple[Priority, int]]:
        """Return class and tokens not computed yet of the prompts that run."""
        return [
            (sequence.request.priority, b.num_admitted_tokens - b.num_computed_tokens - b.num_believed_tokens)
            for sequence in self.prefilling.values()
            for b in (sequence.binding,)
        ]

    def may_join(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run beside the others.

        Those that a worker died under are tried in groups, and beside none that was never tried, so that
        it is known who did it if that happens again. Where it did, they have the worker for themselves.
        """
        trial = self.suspects.values()
        if not sequence.suspect:
            return not trial or not (sequence.untried or any(other.deaths.exclusive for other in trial))
        beside = len(self.sequences) - len(trial)
        if sequence.deaths.exclusive and beside:
            return False
        if beside and any(other.untried and not other.suspect for other in self.prefilling.values()):
            return False
        return len(trial) < min(other.deaths.max_on_trial for other in (sequence, *trial))

    def clear_proven(self) -> None:
        """Let off those that have passed the place where another worker died under them."""
        for handle, sequence in list(self.suspects.items()):
            if sequence.num_tokens >= sequence.deaths.proven_at_len:
                sequence.deaths = Deaths()
                del self.suspects[handle]

    def blocks_of_cancelled(self) -> int:
        """Return the least number of blocks that come free with the cancels on their way."""
        return sum(self.blocks.freed_by(self.sequences[handle]) for handle in self.cancelled)

    def growth_in(self, step: int) -> int:
        """Return the blocks that running sequences may take in a step, beyond those they hold."""
        if not self.info.geometry.paged:
            return 0
        growth = self.blocks.growth[step % self.block_size]
        if len(self.pipeline.in_flight) > 1:
            # Prefills that a plan before the last one completes: their growth is not counted yet.
            growth += sum(1 for sequence in self.prefilling.values() if sequence.left_to_plan <= 0)
        return growth

    def available_blocks(self) -> int:
        """Return the blocks that no plan in flight may take; contiguous memory: in one run."""
        in_flight = sum(flight.blocks for flight in self.pipeline.in_flight)
        pool = self.blocks.pool
        if not self.info.geometry.paged:
            return pool.largest_free_run - in_flight
        return pool.free + pool.evictable - in_flight

    def admit(self, sequence: Sequence, step: int, now: float) -> None:
        """Bind a sequence to this worker, from `step` on."""
        handle = self.next_handle
        self.next_handle += 1
        sequence.binding = Binding(self.worker_id, handle, step, sequence.num_tokens, admitted_at=now)
        self.sequences[handle] = sequence
        self.prefilling[handle] = sequence
        self.running[sequence.request.priority] += 1
        if sequence.suspect:
            self.suspects[handle] = sequence

    def start_decoding(self, sequence: Sequence, step: int) -> None:
        """Its first token has come in `step`: from the next step on it decodes."""
        handle = sequence.binding.handle
        self.prefilling.pop(handle, None)
        self.decoding[handle] = sequence
        self.blocks.start_growth(sequence, step)
        self.context_tokens += sequence.num_tokens
        load = self.loads.setdefault(sequence.request.tenant, TenantLoad())
        load.decodes += 1
        load.context_tokens += sequence.num_tokens

    def decode_stalled(self, sequence: Sequence) -> None:
        """A decode got no block: it takes one in a later step, perhaps in one that is planned already."""
        self.blocks.delay_growth(sequence)
        for flight in self.pipeline.in_flight:
            flight.blocks += 1

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of what is planned; its handle stays until the worker lets go of it."""
        handle = sequence.binding.handle
        decoded = self.decoding.pop(handle, None) is not None
        if decoded:
            self.context_tokens -= sequence.num_tokens
            self._unload(sequence)
        if self.prefilling.pop(handle, None) is not None or decoded:
            self.running[sequence.request.priority] -= 1
        self.blocks.stop_growth(sequence)

    def _unload(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        load = self.loads[tenant]
        load.decodes -= 1
        load.context_tokens -= sequence.num_tokens
        if not load.decodes:
            del self.loads[tenant]

    def cancel(self, sequence: Sequence) -> None:
        """The worker is told to drop a sequence: the report of the next plan must have let go of it."""
        self.stop(sequence)
        self.cancelled[sequence.binding.handle] = self.pipeline.next_step

    def forget(self, sequence: Sequence) -> None:
        """The worker has let go of a sequence."""
        self.stop(sequence)
        handle = sequence.binding.handle
        self.sequences.pop(handle, None)
        self.suspects.pop(handle, None)
        self.cancelled.pop(handle, None)
        for key in self.blocks.drop_keys(sequence):
            for flight in self.pipeline.in_flight:
                # The block counts as evictable from now on, but the plan will take it back.
                flight.blocks += key in flight.shared_keys
        sequence.binding.worker_id = None

    def settle(self, step: int) -> InFlight:
        """Return the plan that a report answers.

        Raises:
            ProtocolViolationError: the report is not the one that is due.
        """
        in_flight = self.pipeline.in_flight
        due = in_flight[0].plan.step if in_flight else None
        if due != step:
            raise ProtocolViolationError(f"report of step {step}, due is {due}")
        flight = in_flight.popleft()
        self.blocks.coming -= flight.blocks_coming
        for handle, tokens in flight.plan.prefill:
            sequence = self.sequences.get(handle)
            if sequence is not None:
                sequence.binding.num_planned_tokens -= tokens
        return flight

    def ends_at(self) -> float:
        """Return when the plans in flight are expected to have run."""
        pipeline = self.pipeline
        if not pipeline.in_flight:
            return 0.0
        began = max(pipeline.last_report_at, pipeline.in_flight[0].sent_at)
        return began + sum(map(self.predict_flight_s, pipeline.in_flight))

    def predict_flight_s(self, flight: InFlight) -> float:
        """Return how long a plan in flight is expected to run."""
        return self.pace.step_times.predict(
            flight.decodes, flight.prefill_tokens, self.context_tokens, flight.prefill_pairs
        )
