"""Does to a stack what the schedule says."""

from __future__ import annotations

import asyncio
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
from octavo_lab.chaos.schedule import KINDS, TAKES_AWAY, Action
from octavo_lab.chaos.stack import ChaosStack, send

_BACK_WITHIN_S: Final = 600.0
"""A process that is drained has ended and serves again within so long, or the stack is broken."""


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

    async def roll(self, pause_s: float) -> None:
        """Drain all workers, all schedulers and a gateway, each when the one before serves again.

        Raises:
            StackError: one does not come back.
        """
        stack = self._stack
        for child in (*stack.workers, *stack.schedulers, *stack.gateways[:1]):
            await asyncio.sleep(pause_s)
            what, former = child.name.partition("-")[0], child.process
            self.done.append(Done(Action(0.0, f"drain-{what}", 0, 0.0), time.monotonic(), child.name))
            stack.strike(child)
            child.signal(signal.SIGTERM)
            await stack.settled(_BACK_WITHIN_S, idle=False, without=former)

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
        stack = self._stack
        all_of = {"worker": stack.workers, "scheduler": stack.schedulers, "gateway": stack.gateways}
        all_of |= {"fault": stack.workers, "port": stack.schedulers + stack.gateways}
        children = [child for child in all_of[what] if child.alive]
        if not children:
            self.done.append(Done(action, at, ""))
            return
        child = children[action.target % len(children)]
        if action.kind in TAKES_AWAY and stack.spares and not await stack.has_another(child):
            self.done.append(Done(action, at, ""))
            return
        self.done.append(Done(action, at, child.name))
        if what == "fault":
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
                    self._stack.revive(child)

    async def _fault(self, action: Action, worker: Child) -> None:
        kind = ops.FaultKind.Value("FAULT_KIND_" + action.kind.replace("-", "_").upper())
        fault = ops.Fault(kind=kind, count=1, duration_ms=round(1000 * action.seconds))
        process = worker.process
        if action.kind == "hang":
            self._stack.strike(worker)
        await self._stack.inject(worker, fault)
        if action.kind == "hang":
            await asyncio.sleep(action.seconds)
            if worker.process is process:
                worker.kill()  # As whoever watches its health would.


def heal(stack: ChaosStack, links: Links) -> None:
    """Undo whatever still lasts."""
    for link in range(links.count):
        links.set(link, False, False)
    for child in stack.children:
        send(child, signal.SIGCONT)
