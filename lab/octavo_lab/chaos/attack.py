"""Does to a stack what the schedule says."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from octavo.stack import Child
from octavo.v1 import operations_pb2 as ops

from octavo_lab.chaos import floods
from octavo_lab.chaos.links import WAYS, Links
from octavo_lab.chaos.schedule import KINDS, Action
from octavo_lab.chaos.stack import ChaosStack, send

_FAULTS: Final = {
    "slow-step": ops.FAULT_KIND_SLOW_STEP,
    "hang": ops.FAULT_KIND_HANG,
    "step-error": ops.FAULT_KIND_STEP_ERROR,
    "oom": ops.FAULT_KIND_STEP_OOM,
    "allocation": ops.FAULT_KIND_ALLOCATION,
    "stream-drop": ops.FAULT_KIND_STREAM_DROP,
    "lost-report": ops.FAULT_KIND_LOST_REPORT,
    "eviction-race": ops.FAULT_KIND_EVICTION_RACE,
}


@dataclass(frozen=True, slots=True)
class Done:
    """An action as it was done: when (monotonic seconds), and to whom; to nobody when `target` is empty."""

    action: Action
    at: float
    target: str


class Attack:
    """Performs actions."""

    def __init__(self, stack: ChaosStack, links: Links) -> None:
        self.done: list[Done] = []
        self._stack = stack
        self._links = links

    async def perform(self, actions: Sequence[Action], began: float) -> None:
        """Do each action at its time, those that last beside the others; return when all are over."""
        async with asyncio.TaskGroup() as group:
            for action in actions:
                await asyncio.sleep(began + action.at_s - time.monotonic())
                group.create_task(self._perform(action))

    def _poisoned(self) -> list[ops.Fault]:
        poison = self._stack.poison
        return [] if poison is None else [ops.Fault(kind=ops.FAULT_KIND_CRASH, token_id=poison)]

    async def _perform(self, action: Action) -> None:
        what = KINDS[action.kind][0]
        at = time.monotonic()
        if what == "link":
            link = action.target % self._links.count
            self.done.append(Done(action, at, f"link-{link}"))
            self._links.set(link, *WAYS[action.kind])
            await asyncio.sleep(action.seconds)
            self._links.set(link, False, False)
            return
        all_of = {"worker": self._stack.workers, "scheduler": self._stack.schedulers}
        all_of |= {"gateway": self._stack.gateways, "port": self._stack.schedulers + self._stack.gateways}
        children = [child for child in all_of[what] if child.alive]
        if not children:
            self.done.append(Done(action, at, ""))
            return
        child = children[action.target % len(children)]
        self.done.append(Done(action, at, child.name))
        if action.kind in _FAULTS:
            await self._fault(action, child)
        elif action.kind in floods.FLOODS:
            command = ("-m", "octavo._child", str(os.getpid()), floods.__name__)
            words = (action.kind, child.address, str(action.seconds))
            flood = await asyncio.create_subprocess_exec(sys.executable, *command, *words)
            await flood.wait()
        else:
            await self._end(action, child)

    async def _end(self, action: Action, child: Child) -> None:
        self._stack.strike(child)
        match action.kind.split("-"):
            case ["kill", *_]:
                child.kill()
            case ["drain", *_]:
                child.signal(signal.SIGTERM)
            case _:
                process = child.process
                send(child, signal.SIGSTOP)
                await asyncio.sleep(action.seconds)
                if child.process is process:
                    send(child, signal.SIGCONT)

    async def _fault(self, action: Action, worker: Child) -> None:
        fault = ops.Fault(kind=_FAULTS[action.kind], count=1, duration_ms=round(1000 * action.seconds))
        process = worker.process
        if action.kind == "hang":
            self._stack.strike(worker)
        await self._stack.inject(worker, *self._poisoned(), fault)
        if action.kind == "hang":
            await asyncio.sleep(action.seconds)
            if worker.process is process:
                worker.kill()  # As whoever watches its health would.


def heal(stack: ChaosStack, links: Links) -> None:
    """Undo whatever still lasts."""
    for link, child in itertools.zip_longest(range(links.count), stack.children):
        if link is not None:
            links.set(link, False, False)
        if child is not None:
            send(child, signal.SIGCONT)
