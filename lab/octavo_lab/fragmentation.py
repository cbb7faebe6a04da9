"""How much of the KV memory holds tokens: paged against contiguous, by block size, from the real allocators.

Traffic: total lengths log-uniform over 50 to 8000 tokens, of which 30 to 90% are prompt. A client does not
know how long its answer will be, so it asks for `max_tokens`, of which it uses a share drawn evenly
from (0, 1]. Whoever waits is served in order; the pool is always under pressure. The contiguous arm
reserves prompt + max_tokens; the paged one takes blocks as tokens come, and preempts the newest
sequence when there is none left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Final

from octavo_lab.command import claim_file
from octavo_lab.plots import BLUE, legend, panels, save, styled
from octavo_lab.report import table
from worker_svc.kv.contiguous import ContiguousMemory
from worker_svc.kv.errors import OutOfBlocks
from worker_svc.kv.memory import KvMemory, Match
from worker_svc.kv.paged import PagedMemory
from worker_svc.kv.pool import BlockPool
from worker_svc.kv.stats import external_fragmentation

BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
_NAMES: Final = {True: "paged", False: "contiguous"}
_STRIDE_TOKENS: Final = 8
"""Tokens that each sequence decodes between two looks at the pool."""


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """Requests in an endless queue; the same for both arms."""

    min_tokens: int = 50
    max_tokens: int = 8000
    pool_tokens: int = 2**17
    num_looks: int = 1500
    warm_up_looks: int = 300
    seed: int = 1


@dataclass(slots=True)
class _Sequence:
    prompt_tokens: int
    total_tokens: int
    reserve_tokens: int
    num_tokens: int = 0
    table: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Means over the looks at a pool."""

    block_size: int
    paged: bool
    utilization: float
    """Written over allocated token slots."""
    occupancy: float
    """Written token slots over all there are."""
    external_fragmentation: float
    """1 - longest free run / free blocks."""
    mean_sequences: float
    preemptions: int


def simulate(traffic: PoolTraffic, *, block_size: int, paged: bool) -> PoolUsage:
    """Run the traffic through one allocator."""
    arm, looks = _Allocator(traffic, block_size, paged), []
    for _ in range(traffic.warm_up_looks + traffic.num_looks):
        arm.decode()
        arm.admit()
        looks.append(arm.look())
    counted = zip(*looks[traffic.warm_up_looks :], strict=True)
    utilization, occupancy, external, sequences = map(fmean, counted)
    return PoolUsage(block_size, paged, utilization, occupancy, external, sequences, arm.preemptions)


class _Allocator:
    """One allocator under the traffic."""

    def __init__(self, traffic: PoolTraffic, block_size: int, paged: bool) -> None:
        self.preemptions = 0
        self._traffic = traffic
        self._block_size = block_size
        self._num_blocks = traffic.pool_tokens // block_size
        self._memory: KvMemory = (
            PagedMemory(BlockPool(self._num_blocks), block_size, 0, 0)
            if paged
            else ContiguousMemory(self._num_blocks, block_size)
        )
        self._rng = random.Random(traffic.seed)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []

    def admit(self) -> None:
        """Take in whoever waits, in order, until one does not fit."""
        with suppress(OutOfBlocks):
            while True:
                if not self._waiting:
                    self._waiting.append(_draw(self._traffic, self._rng))
                sequence = self._waiting[0]
                num_tokens = max(sequence.prompt_tokens, sequence.num_tokens)
                placement = self._memory.admit(Match(), num_tokens, sequence.reserve_tokens)
                sequence.table, sequence.num_tokens = placement.block_table, num_tokens
                self._running.append(self._waiting.popleft())

    def decode(self) -> None:
        """Let each sequence write its next tokens; those at their end give their blocks back."""
        for sequence in list(self._running):
            if not sequence.table:
                continue
            sequence.num_tokens = min(sequence.num_tokens + _STRIDE_TOKENS, sequence.total_tokens)
            while sequence.num_tokens > len(sequence.table) * self._block_size:
                try:
                    self._memory.grow(sequence.table)
                except OutOfBlocks:
                    victim = next(one for one in reversed(self._running) if one.table and one is not sequence)
                    self._memory.release(victim.table)
                    self._waiting.appendleft(victim)
                    self.preemptions += 1
        for sequence in self._running:
            if sequence.table and sequence.num_tokens == sequence.total_tokens:
                self._memory.release(sequence.table)
        self._running = [sequence for sequence in self._running if sequence.table]

    def look(self) -> tuple[float, float, float, int]:
        """Return what is told of now: the shares and the sequences of `PoolUsage`, in its order."""
        report = self._memory.report(0)
        written = sum(sequence.num_tokens for sequence in self._running)
        return (
            written / (report.active * self._block_size),
            written / (self._num_blocks * self._block_size),
            external_fragmentation(report),
            len(self._running),
        )


def _draw(traffic: PoolTraffic, rng: random.Random) -> _Sequence:
    low, high = math.log(traffic.min_tokens), math.log(traffic.max_tokens)
    total = round(math.exp(rng.uniform(low, high)))
    prompt = max(1, round(total * rng.uniform(0.3, 0.9)))
    asked = math.ceil((total - prompt) / (1.0 - rng.random()))
    return _Sequence(prompt, total, min(prompt + asked, traffic.max_tokens + traffic.min_tokens))


def as_text(usages: Sequence[PoolUsage]) -> str:
    """Return the results as a Markdown table."""
    rows = []
    for one in usages:
        shares = f"{one.utilization:.1%}", f"{one.occupancy:.1%}", f"{one.mean_sequences:.0f}"
        rows.append((one.block_size, _NAMES[one.paged], *shares, f"{one.external_fragmentation:.0%}"))
    told = ("written / allocated", "written / pool", "sequences", "ext. fragmentation")
    return table(("block size", "allocator", *told), rows)


def plot(usages: Sequence[PoolUsage], path: Path) -> None:
    """Draw both shares by block size."""
    with styled():
        figure, drawn = panels((9, 3.6), columns=2, sharey=True)
        for axis, title, share in (
            (drawn[0], "written / allocated slots", attrgetter("utilization")),
            (drawn[1], "written / all slots of the pool", attrgetter("occupancy")),
        ):
            for offset, paged, colour in ((-0.2, True, BLUE), (0.2, False, "#c9a227")):
                shares = [100 * share(usage) for usage in usages if usage.paged is paged]
                places = [index + offset for index in range(len(shares))]
                bars = axis.bar(places, shares, 0.38, label=_NAMES[paged], color=colour)
                axis.bar_label(bars, fmt="%.0f", fontsize=8)
            sizes = sorted({usage.block_size for usage in usages})
            axis.set_xticks(range(len(sizes)), map(str, sizes))
            axis.set_xlabel("block size (tokens)")
            axis.set_title(title, fontsize=10)
            axis.grid(axis="x", visible=False)
        drawn[0].set(ylabel="%", ylim=(0, 110))
        legend(figure, drawn[0])
        save(figure, path)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares into this file")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default 1)")


def run(arguments: argparse.Namespace) -> str:
    """Simulate every block size with both allocators; return the table."""
    if arguments.plot is not None:
        claim_file(arguments.plot)
    traffic = PoolTraffic(seed=arguments.seed)
    arms = itertools.product(BLOCK_SIZES, _NAMES)
    usages = [simulate(traffic, block_size=block_size, paged=paged) for block_size, paged in arms]
    if arguments.plot is not None:
        plot(usages, arguments.plot)
    if arguments.json:
        return json.dumps([asdict(usage) for usage in usages], indent=2)
    return as_text(usages)
