"""The waiting queue of one model: priority classes with aging, a policy inside each."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from octavo.protocol.steps import Priority

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies import POLICIES, Charges, Policy
from scheduler_svc.core.request import Sequence


class Lane:
    """The waiting of one class.

    Sequences that ran before (preempted, or their worker died) stand in front, in their old order.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._front: deque[Sequence] = deque()
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        self.num_tokens = 0
        """Tokens that the waiting will have to prefill at most."""

    def __len__(self) -> int:
        return len(self._front) + len(self._fresh)

    def push(self, sequence: Sequence) -> None:
        """Add at the end."""
        self._fresh[sequence] = None
        self._policy.push(sequence)
        self.num_tokens += sequence.num_tokens

    def push_front(self, sequence: Sequence) -> None:
        """Put one that ran before in front, ordered among its like by arrival."""
        position = 0
        for other in self._front:
            if other.request.arrival > sequence.request.arrival:
                break
            position += 1
        self._front.insert(position, sequence)
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take one out."""
        if sequence in self._fresh:
            del self._fresh[sequence]
            self._policy.remove(sequence)
        else:
            self._front.remove(sequence)
        self.num_tokens -= sequence.num_tokens

    def oldest_arrival(self) -> float | None:
        """Return when the longest waiting arrived."""
        arrivals = [next(iter(group)).request.arrival for group in (self._front, self._fresh) if group]
        return min(arrivals, default=None)

    def order(self, now: float, starvation_age_s: float) -> Iterator[Sequence]:
        """Yield those in front, then, by age, whoever has waited too long, then by policy."""
        yield from self._front
        starving: set[Sequence] = set()
        for sequence in self._fresh:
            if now - sequence.request.arrival < starvation_age_s:
                break
            starving.add(sequence)
            yield sequence
        for sequence in self._policy.order():
            if sequence not in starving:
                yield sequence


class WaitingQueue:
    """All sequences of one model that wait for a worker.

    Higher classes go first. A class whose oldest has waited longer than its aging time takes every
    `aging_stride`-th start although higher ones wait. So nobody starves: the k-th of a class starts,
    at the latest, after its aging time and k * aging_stride starts. And a flood of old work of a
    low class costs the higher ones one start in `aging_stride` and no more.
    """

    def __init__(self, config: CoreConfig, charges: Charges) -> None:
        self._config = config
        policy = POLICIES[config.policy]
        self.lanes = {priority: Lane(policy(charges)) for priority in Priority}
        self._starts_since_aged = 0
        self.num_fresh = 0
        """Sequences that have not run yet."""

    def __len__(self) -> int:
        return sum(len(lane) for lane in self.lanes.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting will have to prefill at most."""
        return sum(lane.num_tokens for lane in self.lanes.values())

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that has not run."""
        self.lanes[sequence.request.priority].push(sequence)
        self.num_fresh += 1

    def push_front(self, sequence: Sequence) -> None:
        """Add a sequence that was bound to a worker before, ahead of its class."""
        sequence.deferrals = 0
        self.lanes[sequence.request.priority].push_front(sequence)
        if sequence.started_at is None:
            self.num_fresh += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self.lanes[sequence.request.priority].remove(sequence)
        if sequence.started_at is None:
            self.num_fresh -= 1
        sequence.blocked_since = None

    def start(self, sequence: Sequence) -> None:
        """Take a sequence out to run, and count the start towards the turn of aged classes."""
        self.remove(sequence)
        priority = sequence.request.priority
        passed = any(self.lanes[higher] for higher in Priority if higher < priority)
        self._starts_since_aged = 0 if passed else self._starts_since_aged + 1

    def order(self, now: float) -> Iterator[Sequence]:
        """Yield the waiting, best first, while nothing is changed."""
        aged = self._aged_head(now) if self._starts_since_aged >= self._config.aging_stride else None
        if aged is not None:
            yield aged
        for lane in self.lanes.values():
            if lane:
                for sequence in lane.order(now, self._config.starvation_age_s):
                    if sequence is not aged:
                        yield sequence

    def _aged_head(self, now: float) -> Sequence | None:
        """Return the first of the class that has waited longest past its aging time."""
        worst: tuple[float, Sequence] | None = None
        for priority, lane in self.lanes.items():
            oldest = lane.oldest_arrival()
            aging = self._config.aging_s[priority]
            if oldest is None or now - oldest <= aging:
                continue
            if worst is None or now - oldest - aging > worst[0]:
                worst = (now - oldest - aging, next(lane.order(now, 0.0)))
        return worst[1] if worst is not None else None
