"""The waiting queue of one model: priority classes with aging, a policy inside each."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from octavo.protocol.steps import Priority

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies import POLICIES, Charges, Policy
from scheduler_svc.core.request import Sequence

if TYPE_CHECKING:
    from scheduler_svc.core.admission import Ask


def _arrival(sequence: Sequence) -> float:
    return sequence.request.arrival


class Lane:
    """The waiting of one class.

    Sequences whose request ran before (preempted, their worker died, siblings of one that runs) stand
    in front, by arrival.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._front: list[Sequence] = []
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        self.num_tokens = 0
        """Tokens that the waiting will have to prefill at most."""
        self.bounded_requests = 0
        self.bounded_tokens = 0
        """Those that the queue's bounds count: choices not run yet, and not from a paced client."""
        self.stranded: set[Sequence] = set()
        """Those that no worker of the moment can hold, while others could run."""
        self.stranded_tokens = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._fresh)

    @property
    def num_servable(self) -> int:
        """Sequences that do not wait for a worker that is away."""
        return len(self) - len(self.stranded)

    @property
    def servable_tokens(self) -> int:
        """Their tokens."""
        return self.num_tokens - self.stranded_tokens

    def push(self, sequence: Sequence) -> None:
        """Add at the end."""
        self._fresh[sequence] = None
        self._policy.push(sequence)
        self.num_tokens += sequence.num_queued_tokens

    def push_front(self, sequence: Sequence) -> None:
        """Put in front, ordered among its like by arrival."""
        bisect.insort(self._front, sequence, key=_arrival)
        self.num_tokens += sequence.num_queued_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take one out."""
        if sequence in self._fresh:
            del self._fresh[sequence]
            self._policy.remove(sequence)
        else:
            self._front.remove(sequence)
        self.num_tokens -= sequence.num_queued_tokens
        if sequence in self.stranded:
            self.stranded.remove(sequence)
            self.stranded_tokens -= sequence.num_queued_tokens

    def strand(self, sequence: Sequence) -> None:
        """No worker of the moment can hold a sequence that waits."""
        self.stranded.add(sequence)
        self.stranded_tokens += sequence.num_queued_tokens

    def sort_out(self, is_stranded: Callable[[Sequence], bool]) -> None:
        """Look anew at whom the workers can hold."""
        self.stranded.clear()
        self.stranded_tokens = 0
        for sequence in itertools.chain(self._front, self._fresh):
            if is_stranded(sequence):
                self.strand(sequence)

    def bounded_servable(self) -> tuple[int, int]:
        """Return the requests that the queue's bounds count and that some worker can hold; their tokens."""
        stranded = [s for s in self.stranded if s.started_at is None and not s.request.spec.paced]
        tokens = sum(sequence.num_queued_tokens for sequence in stranded)
        requests = {sequence.request for sequence in stranded}
        return self.bounded_requests - len(requests), self.bounded_tokens - tokens

    def ahead_of(self, tenant: str, deadline: float) -> int:
        """Return how many would go before a newcomer; of those that are stranded, none."""
        ahead = len(self._front) + self._policy.ahead_of(tenant, deadline)
        return -(-ahead * self.num_servable // len(self)) if self.stranded else ahead

    def last_to_displace(self) -> Sequence | None:
        """Return who came last of those that the bounds count."""
        return next((s for s in reversed(self._fresh) if not s.request.spec.paced), None)

    def oldest_arrival(self) -> float | None:
        """Return when the longest waiting arrived."""
        oldest = next(self.by_age(), None)
        return oldest.request.arrival if oldest is not None else None

    def by_age(self) -> Iterator[Sequence]:
        """Yield the longest waiting first."""
        return heapq.merge(self._front, self._fresh, key=_arrival)

    def order(self) -> Iterator[Sequence]:
        """Yield those in front, then as the policy says."""
        yield from self._front
        yield from self._policy.order()


class _Cursor:
    """What a pass over the queue has not yielded yet of one class."""

    def __init__(self, lane: Lane, aging_s: float) -> None:
        self._lane = lane
        self._order = lane.order()
        self._ages: Iterator[Sequence] | None = None
        """Begun when somebody asks: most passes end before a turn can come up."""
        self._oldest: Sequence | None = None
        self._yielded: set[Sequence] = set()
        self._aging_s = aging_s
        self.left = len(lane)

    def take(self) -> Sequence:
        """Return the next of the class."""
        sequence = next(self._order)
        self._yielded.add(sequence)
        self.left -= 1
        return sequence

    def due_at(self) -> float:
        """Return when the oldest that is left is old enough for a turn."""
        if self._ages is None:
            self._ages = self._lane.by_age()
        while self._oldest is None or self._oldest in self._yielded:
            self._oldest = next(self._ages)
        return self._oldest.request.arrival + self._aging_s


class WaitingQueue:
    """All sequences of one model that wait for a worker.

    Higher classes go first. But every `aging_stride`-th start, while somebody has waited past the
    aging time of its class behind a higher one, is a turn of the class in which that happened
    first; its policy says who takes it. `docs/scheduler.md` derives the bound on anybody's wait.
    """

    def __init__(self, config: CoreConfig, charges: Charges) -> None:
        self._config = config
        policy = POLICIES[config.policy]
        self.lanes = {priority: Lane(policy(charges, config.starvation_age_s)) for priority in Priority}
        self._starts_since_turn = 0
        self._turns: set[Sequence] = set()
        """Whom the last pass has yielded on a turn."""
        self.num_fresh = 0
        """Sequences that have not run yet."""
        self.unplaced: list[Sequence] = []
        """Sequences for which an idle worker is to be looked for."""
        self._reach: dict[str | None, int] = {}
        """Tokens that some worker holds of a sequence, by its adapter; empty: there are no workers."""

    def __len__(self) -> int:
        return sum(map(len, self.lanes.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting will have to prefill at most."""
        return sum(lane.num_tokens for lane in self.lanes.values())

    @property
    def num_servable(self) -> int:
        """Sequences that some worker can hold; while there are none: all."""
        return sum(lane.num_servable for lane in self.lanes.values())

    def set_reach(self, reach: dict[str | None, int]) -> None:
        """Note how long a sequence the workers can hold, by its adapter; those that drain left out."""
        if reach != self._reach:
            self._reach = reach
            for lane in self.lanes.values():
                lane.sort_out(self._is_stranded)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence of a new request."""
        sequence.num_queued_tokens = sequence.num_tokens
        self.lanes[sequence.request.priority].push(sequence)
        self._pushed(sequence)

    def push_front(self, sequence: Sequence, shared_tokens: int = 0) -> None:
        """Add a sequence ahead of its class: it was bound to a worker before, or its leader is.

        Some of its tokens may be in blocks of its leader.
        """
        sequence.num_queued_tokens = sequence.num_tokens - shared_tokens
        sequence.left_until = None
        self.lanes[sequence.request.priority].push_front(sequence)
        self._pushed(sequence)

    def _is_stranded(self, sequence: Sequence) -> bool:
        request, reach = sequence.request, self._reach
        return bool(reach) and request.max_total_tokens > reach.get(request.spec.adapter, 0)

    def _pushed(self, sequence: Sequence) -> None:
        self._count(sequence, 1)
        if self._is_stranded(sequence):
            self.lanes[sequence.request.priority].strand(sequence)
        self.unplaced.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self.lanes[sequence.request.priority].remove(sequence)
        self._count(sequence, -1)
        sequence.blocked_since = None
        sequence.no_longer_left()

    def _count(self, sequence: Sequence, one: int) -> None:
        if sequence.started_at is not None:
            return
        self.num_fresh += one
        request = sequence.request
        if not request.spec.paced:
            lane = self.lanes[request.priority]
            before, request.num_bounded = request.num_bounded, request.num_bounded + one
            lane.bounded_requests += (request.num_bounded > 0) - (before > 0)
            lane.bounded_tokens += one * sequence.num_queued_tokens

    def bounded_requests(self) -> int:
        """Return the waiting that the queue's bound counts."""
        return sum(lane.bounded_requests for lane in self.lanes.values())

    def bounded_tokens(self) -> int:
        """Return their tokens."""
        return sum(lane.bounded_tokens for lane in self.lanes.values())

    def ahead_of(self, ask: Ask, now: float) -> tuple[int, int]:
        """Return how many would go before a newcomer, and their tokens (by their mean, of its class)."""
        due = [at for at in (ask.ttft_deadline, ask.deadline) if at is not None]
        deadline = min([*due, now + self._config.starvation_age_s])
        count = tokens = 0
        aged = False
        for priority, lane in self.lanes.items():
            if priority < ask.priority:
                count += lane.num_servable
                tokens += lane.servable_tokens
            elif priority == ask.priority and lane.num_servable:
                ahead = lane.ahead_of(ask.tenant, deadline)
                count += ahead
                tokens += lane.servable_tokens * ahead // lane.num_servable
            elif lane.num_servable:
                oldest = next((one for one in lane.by_age() if one not in lane.stranded), None)
                aging_s = self._config.aging_s[priority]
                aged = aged or (oldest is not None and now - oldest.request.arrival >= aging_s)
        stride = self._config.aging_stride
        if aged and count and stride > 1:
            # Every so many starts, one of them has its turn.
            count += count // (stride - 1)
        return count, tokens

    def last_below(self, priority: Priority) -> Sequence | None:
        """Return who would be displaced by a newcomer: the last to come of the lowest class below its own."""
        for lower, lane in reversed(self.lanes.items()):
            if lower > priority and lane.bounded_requests:
                found = lane.last_to_displace()
                if found is not None:
                    return found
        return None

    def start(self, sequence: Sequence) -> None:
        """Take a sequence out to run, and count the start towards the next turn."""
        self.remove(sequence)
        self._starts_since_turn = 0 if sequence in self._turns else self._starts_since_turn + 1

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield the waiting as if each were started, best first, while nothing is changed."""
        self._turns.clear()
        starts = self._starts_since_turn
        aging_s = self._config.aging_s
        cursors = [_Cursor(lane, aging_s[priority]) for priority, lane in self.lanes.items() if lane]
        while cursors:
            cursor, starts = cursors[0], starts + 1
            if starts >= self._config.aging_stride and len(cursors) > 1:
                passed = min(cursors[1:], key=_Cursor.due_at)
                if passed.due_at() <= now:
                    cursor, starts = passed, 0
            sequence = cursor.take()
            if not starts:
                self._turns.add(sequence)
            if not cursor.left:
                cursors.remove(cursor)
            yield sequence
