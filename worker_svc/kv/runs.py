"""Free blocks, kept as maximal runs of neighbours."""

from __future__ import annotations

from collections.abc import Iterable

from worker_svc.kv.errors import require


class FreeRuns:
    """The free blocks of a pool as maximal runs of consecutive ids.

    Both allocators stand on it: the paged one takes any blocks, the contiguous one a run. Blocks
    always leave from the front of a run, which is what makes every operation O(1) per block and the
    longest run known at all times.
    """

    def __init__(self, first: int, count: int) -> None:
        self.num_free = 0
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._runs_of_length = [0] * (count + 1)
        self._longest = 0
        if count:
            self._insert(first, count)
            self.num_free = count

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return self._longest

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the runs that changed last; the caller knows that there are enough."""
        taken: list[int] = []
        self.num_free -= count
        while count:
            start, length = self._length_at.popitem()
            used = min(count, length)
            self._cut_front(start, length, used)
            taken.extend(range(start, start + used))
            count -= used
        return taken

    def take_run(self, count: int) -> int | None:
        """Take the lowest run of `count` blocks (first fit) and return its first block, if there is one."""
        if count > self._longest:
            return None
        start = min(start for start, length in self._length_at.items() if length >= count)
        self._cut_front(start, self._length_at.pop(start), count)
        self.num_free -= count
        return start

    def give(self, blocks: Iterable[int]) -> None:
        """Add blocks that are not free now."""
        length_at, start_before, counts = self._length_at, self._start_before, self._runs_of_length
        longest = self._longest
        # In order, so that neighbours are joined before they are looked up; what ends them is no block.
        ordered = sorted(blocks)
        self.num_free += len(ordered)
        ordered.append(-1)
        start = end = ordered[0]
        for block in ordered:
            if block == end:
                end += 1
                continue
            run_end = end
            if start in start_before:
                start = start_before.pop(start)
                counts[length_at.pop(start)] -= 1
            if end in length_at:
                length = length_at.pop(end)
                counts[length] -= 1
                run_end += length
            length = run_end - start
            length_at[start] = length
            start_before[run_end] = start
            counts[length] += 1
            if length > longest:  # noqa: PLR1730  max() costs a third of this loop
                longest = length
            start, end = block, block + 1
        self._longest = longest

    def give_run(self, start: int, end: int) -> None:
        """Add the blocks [start, end), none of them free now."""
        self.give(range(start, end))

    def blocks(self) -> Iterable[int]:
        """Yield every free block; for audits."""
        for start, length in self._length_at.items():
            yield from range(start, start + length)

    def check_integrity(self) -> None:
        """Raise IntegrityError when the runs are not what the free blocks say."""
        blocks = sorted(self.blocks())
        require("free blocks are distinct", len(blocks) == len(set(blocks)), blocks)
        require("the free count is the sum of the runs", len(blocks) == self.num_free, self.num_free)
        runs: dict[int, int] = {}
        start = previous = None
        for block in blocks:
            if start is None or previous is None or block != previous + 1:
                start = block
            runs[start] = runs.get(start, 0) + 1
            previous = block
        require("free runs are maximal", runs == self._length_at, self._length_at)
        ends = {start + length: start for start, length in runs.items()}
        require("free runs are known by their ends", ends == self._start_before, self._start_before)
        require("the longest run is known", max(runs.values(), default=0) == self._longest, self._longest)

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._runs_of_length[length] += 1
        self._longest = max(self._longest, length)

    def _cut_front(self, start: int, length: int, used: int) -> None:
        """Put back what is left of a run after its first `used` blocks were taken."""
        self._runs_of_length[length] -= 1
        if used < length:
            self._insert(start + used, length - used)
        else:
            del self._start_before[start + length]
        # What is left of the longest run bounds this search by `used`.
        counts = self._runs_of_length
        while self._longest and not counts[self._longest]:
            self._longest -= 1
