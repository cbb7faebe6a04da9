"""Short requests for a long time: whether memory and descriptors of every process stay as they are."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from octavo.aio import AsyncClient

from octavo_lab.chaos.stack import ChaosStack, Sizes, running
from octavo_lab.plots import panels, save, styled
from octavo_lab.report import table

_SPEED: Final = ("--sim-speed", "50", "--max-num-seqs", "128")
_READY_S: Final = 600.0
_SAMPLES: Final = 240
_SHOWN: Final = 12
_MIB: Final = 2**20
FLAT_MIB: Final = 4.0
"""Memory that grows by no more in the second half of a run is flat: allocators keep what they had once."""
FLAT_DESCRIPTORS: Final = 2


@dataclass(frozen=True, slots=True)
class Held:
    """Resident bytes and descriptors of each process, by name, `at_s` after the first request."""

    at_s: float
    requests: int
    of: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Curve:
    """What a run has seen. Growth is that of a line through the second half: the first half warms up."""

    samples: Sequence[Held]
    failed: Counter[str]
    """Requests without an answer, by reason; those that were refused for load, too."""

    def growth(self) -> dict[str, tuple[float, float]]:
        """Return MiB and descriptors that each process has gained over the second half, by name."""
        late = self.samples[len(self.samples) // 2 :]
        at = np.array([sample.at_s for sample in late])
        found = {}
        for name in late[-1].of:
            values = np.array([sample.of[name] for sample in late], dtype=float)
            gained = np.polyfit(at, values, 1)[0] * (at[-1] - at[0])
            found[name] = (float(gained[0]) / _MIB, float(gained[1]))
        return found

    @property
    def flat(self) -> bool:
        """Whether no process has grown, and no request failed."""
        grown = self.growth().values()
        return not self.failed and all(mib <= FLAT_MIB and fds <= FLAT_DESCRIPTORS for mib, fds in grown)

    def as_text(self) -> str:
        """Return the curve as a table: MiB and descriptors of each process over time."""
        last, grown = self.samples[-1], self.growth()
        shown = np.unique(np.linspace(0, len(self.samples) - 1, _SHOWN, dtype=int))
        rows = [
            (
                f"{one.at_s:.0f}",
                one.requests,
                *(f"{one.of[name][0] / _MIB:.1f} / {one.of[name][1]}" for name in grown),
            )
            for one in (self.samples[index] for index in shown)
        ]
        rows.append(("gained", "", *(f"{mib:+.2f} / {fds:+.1f}" for mib, fds in grown.values())))
        verdict = "flat" if self.flat else "NOT flat"
        why = "".join(f", {count} {reason}" for reason, count in self.failed.most_common())
        told = f"{last.requests} requests in {last.at_s:.0f} s, {self.failed.total()} failed{why}: {verdict}"
        return f"{table(('seconds', 'requests', *grown), rows)}\n\nMiB / descriptors. {told}"

    def write(self, folder: Path) -> None:
        """Write the curve as a plot, or raise OSError."""
        with styled():
            figure, axes = panels((10, 6), rows=2, sharex=True)
            for index, (axis, label) in enumerate(zip(axes, ("MiB", "descriptors"), strict=True)):
                for name in self.samples[-1].of:
                    curve = [sample.of[name][index] / (_MIB, 1)[index] for sample in self.samples]
                    axis.plot([sample.requests for sample in self.samples], curve, label=name)
                axis.set_ylabel(label)
            axes[0].legend(loc="upper left")
            axes[1].set_xlabel("requests")
            save(figure, folder / "churn.png")


def churn(sizes: Sizes, seconds: float, requests: int, streams: int) -> Curve:
    """Send short requests until either bound is reached; StackError: the stack cannot start."""
    args = (*sizes.worker_args, *_SPEED)
    # No worker is lost that only waits for its turn on a busy machine.
    quiet = replace(sizes, runner="sim", gateways=0, watchdog_s=_READY_S, worker_args=args)
    with running(quiet) as (stack, _):
        return asyncio.run(_run(stack, seconds, requests, streams))


async def _run(stack: ChaosStack, seconds: float, requests: int, streams: int) -> Curve:
    await stack.settled(_READY_S)
    samples: list[Held] = []
    done, failed, began = itertools.count(), Counter[str](), time.monotonic()
    count = 0

    async def stream(client: AsyncClient) -> None:
        nonlocal count
        while time.monotonic() < began + seconds and (number := next(done)) < requests:
            prompt = [3 + (number // 200 + place) % 200 for place in range(8)]
            try:
                answer = await client.generate(
                    [3 + number % 200, *prompt], max_tokens=1 + number % 2, skip_text=True
                )
                if not answer.token_ids:
                    failed["nothing"] += 1
            except Exception as error:  # noqa: BLE001 # it is counted, whatever it is
                failed[getattr(error, "reason", type(error).__name__)] += 1
            count += 1

    async def watch() -> None:
        while True:
            samples.append(Held(time.monotonic() - began, count, stack.resources()))
            await asyncio.sleep(max(0.5, seconds / _SAMPLES))

    async with AsyncClient(stack.endpoints) as client:
        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(stream(client) for _ in range(streams)))
        watcher.cancel()
    await stack.settled(_READY_S)
    samples.append(Held(time.monotonic() - began, count, stack.resources()))
    return Curve(samples, failed)
