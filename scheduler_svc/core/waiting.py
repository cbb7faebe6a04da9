"""The waiting queue of one model: priority classes with aging, a policy inside each."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from octavo.protocol.steps import Priority

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.events import AdmissionRequest
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.policies.base import Charges, Policy
from scheduler_svc.core.request import Sequence


def _arrival(sequence: Sequence) -> float:
    return sequence.request.arrival


class ClassQueue:
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
        self.num_tokens += sequence.waiting.num_tokens

    def push_front(self, sequence: Sequence) -> None:
        """Put in front, ordered among its like by arrival."""
        bisect.insort(self._front, sequence, key=_arrival)
        self.num_tokens += sequence.waiting.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take one out."""
        if sequence in self._fresh:
            del self._fresh[sequence]
            self._policy.remove(sequence)
        else:
            self._front.remove(sequence)
        self.num_tokens -= sequence.waiting.num_tokens
        if sequence in self.stranded:
            self.stranded.remove(sequence)
            self.stranded_tokens -= sequence.waiting.num_tokens

    def strand(self, sequence: Sequence) -> None:
        """No worker of the moment can hold a sequence that waits."""
        self.stranded.add(sequence)
        self.stranded_tokens += sequence.waiting.num_tokens

    def sort_out(self, is_stranded: Callable[[Sequence], bool]) -> None:
        """Look anew at whom the workers can hold."""
        self.stranded.clear()
        self.stranded_tokens = 0
        for sequence in itertools.chain(self._front, self._fresh):
            if is_stranded(sequence):
                self.strand(sequence)

    def bounded_servable(self) -> tuple[int, int]:
        """Return the requests that the queue's bounds count and that some worker can hold; their tokens."""
        stranded = [s for s in self.stranded if s.history.started_at is None and not s.request.spec.paced]
        tokens = sum(sequence.waiting.num_tokens for sequence in stranded)
        requests = {sequence.request for sequence in stranded}
        return self.bounded_requests - len(requests), self.bounded_tokens - tokens

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> int:
        """Return how many would go before a newcomer; of those that are stranded, none."""
        ahead = len(self._front) + self._policy.ahead_of(newcomer, now)
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

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield those in front, then as the policy says."""
        yield from self._front
        yield from self._policy.order(now)


class _Cursor:
    """What a pass over the queue has not yielded yet of one class."""

    def __init__(self, queue: ClassQueue, aging_s: float, now: float) -> None:
        self._queue = queue
        self._order = queue.order(now)
        self._ages: Iterator[Sequence] | None = None
        """Begun when somebody asks: most passes end before a turn can come up."""
        self._oldest: Sequence | None = None
        self._yielded: set[Sequence] = set()
        self._aging_s = aging_s
        self.left = len(queue)

    def take(self) -> Sequence:
        """Return the next of the class."""
        sequence = next(self._order)
        self._yielded.add(sequence)
        self.left -= 1
        return sequence

    def due_at(self) -> float:
        """Return when the oldest that is left is old enough for a turn."""
        if self._ages is None:
            self._ages = self._queue.by_age()
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
        self.classes = {
            priority: ClassQueue(policy(charges, config.starvation_age_s)) for priority in Priority
        }
        self._starts_since_turn = 0
        self.num_fresh = 0
        """Sequences that have not run yet."""
        self.unplaced: list[Sequence] = []
        """Sequences for which an idle worker is to be looked for."""
        self._reach: dict[str | None, int] = {}
        """Tokens that some worker holds of a sequence, by its adapter; empty: there are no workers."""

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting will have to prefill at most."""
        return sum(queue.num_tokens for queue in self.classes.values())

    @property
    def num_servable(self) -> int:
        """Sequences that some worker can hold; while there are none: all."""
        return sum(queue.num_servable for queue in self.classes.values())

    def set_reach(self, reach: dict[str | None, int]) -> None:
        """Note how long a sequence the workers can hold, by its adapter; those that drain left out."""
        if reach != self._reach:
            self._reach = reach
            for queue in self.classes.values():
                queue.sort_out(self._is_stranded)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence of a new request."""
        sequence.waiting.num_tokens = sequence.num_tokens
        self.classes[sequence.request.priority].push(sequence)
        self._pushed(sequence)

    def push_front(self, sequence: Sequence, shared_tokens: int = 0) -> None:
        """Add a sequence ahead of its class: it was bound to a worker before, or its leader is.

        Some of its tokens may be in blocks of its leader.
        """
        sequence.waiting.num_tokens = sequence.num_tokens - shared_tokens
        sequence.waiting.deferred_until = None
        self.classes[sequence.request.priority].push_front(sequence)
        self._pushed(sequence)

    def _is_stranded(self, sequence: Sequence) -> bool:
        request, reach = sequence.request, self._reach
        return bool(reach) and request.max_total_tokens > reach.get(request.spec.adapter, 0)

    def _pushed(self, sequence: Sequence) -> None:
        self._count(sequence, 1)
        if self._is_stranded(sequence):
            self.classes[sequence.request.priority].strand(sequence)
        self.unplaced.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self.classes[sequence.request.priority].remove(sequence)
        self._count(sequence, -1)
        sequence.waiting.blocked_since = None
        sequence.end_deferral()

    def _count(self, sequence: Sequence, one: int) -> None:
        if sequence.history.started_at is not None:
            return
        self.num_fresh += one
        request = sequence.request
        if not request.spec.paced:
            queue = self.classes[request.priority]
            before, request.num_bounded = request.num_bounded, request.num_bounded + one
            queue.bounded_requests += (request.num_bounded > 0) - (before > 0)
            queue.bounded_tokens += one * sequence.waiting.num_tokens

    def bounded_requests(self) -> int:
        """Return the waiting that the queue's bound counts."""
        return sum(queue.bounded_requests for queue in self.classes.values())

    def bounded_tokens(self) -> int:
        """Return their tokens."""
        return sum(queue.bounded_tokens for queue in self.classes.values())

    def ahead_of(self, newcomer: AdmissionRequest, now: float) -> tuple[int, int]:
        """Return how many would go before a newcomer, and their tokens (by their mean, of its class)."""
        count = tokens = 0
        aged = False
        for priority, queue in self.classes.items():
            if priority < newcomer.priority:
                count += queue.num_servable
                tokens += queue.servable_tokens
            elif priority == newcomer.priority and queue.num_servable:
                ahead = queue.ahead_of(newcomer, now)
                count += ahead
                tokens += queue.servable_tokens * ahead // queue.num_servable
            elif queue.num_servable:
                oldest = next((one for one in queue.by_age() if one not in queue.stranded), None)
                aging_s = self._config.aging_s[priority]
                aged = aged or (oldest is not None and now - oldest.request.arrival >= aging_s)
        stride = self._config.aging_stride
        if aged and count and stride > 1:
            # Every so many starts, one of them has its turn.
            count += count // (stride - 1)
        return count, tokens

    def last_below(self, priority: Priority) -> Sequence | None:
        """Return who would be displaced by a newcomer: the last to come of the lowest class below its own."""
        for lower, queue in reversed(self.classes.items()):
            if lower > priority and queue.bounded_requests:
                found = queue.last_to_displace()
                if found is not None:
                    return found
        return None

    def start(self, sequence: Sequence, *, on_turn: bool) -> None:
        """Take a sequence out to run, and count the start towards the next turn."""
        self.remove(sequence)
        self._starts_since_turn = 0 if on_turn else self._starts_since_turn + 1

    def order(self, now: float, turns: set[Sequence] | None = None) -> Iterator[Sequence]:
        """Yield the waiting as if each were started, best first, while nothing is changed.

        Whom it yields on a turn is added to `turns`, for `start`.
        """
        starts = self._starts_since_turn
        aging_s = self._config.aging_s
        cursors = [
            _Cursor(queue, aging_s[priority], now) for priority, queue in self.classes.items() if queue
        ]
        while cursors:
            cursor, starts = cursors[0], starts + 1
            if starts >= self._config.aging_stride and len(cursors) > 1:
                passed = min(cursors[1:], key=_Cursor.due_at)
                if passed.due_at() <= now:
                    cursor, starts = passed, 0
            sequence = cursor.take()
            if not starts and turns is not None:
                turns.add(sequence)
            if not cursor.left:
                cursors.remove(cursor)
            yield sequence
