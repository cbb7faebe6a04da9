"""The stacks under test: one per arm, kept up while others are measured, as many as memory allows.

A stack that has nothing to do costs memory and no time, so that arms can take turns every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
from octavo.stack import Stack, StackConfig, StackError

from octavo_lab.command import BenchError
from octavo_lab.ladder.config import Arm, LadderConfig, StaticSettings
from octavo_lab.machine import tree_bytes

_SPARE_BYTES: Final = 1 << 30
"""Memory that is left to the rest of the machine."""
_GROWTH: Final = 1.3
"""What a stack may take under load, as a multiple of what it takes when it is ready."""


class ArmStacks:
    """Starts stacks when they are first asked for, and ends the least recently used when memory is short."""

    def __init__(self, config: LadderConfig, logs: Path, on_event: Callable[[str], None]) -> None:
        self._config = config
        self._logs = logs
        self._on_event = on_event
        self._stacks: dict[str, tuple[Stack, tuple[str, ...]]] = {}
        self._stack_bytes = 0

    def use(self, arm: Arm, static: StaticSettings) -> Stack:
        """Return the stack of an arm, ready; BenchError: it does not start, for the reason that it gives."""
        wanted = self._config.scheduler_args(arm, static)
        stack, current = self._stacks.get(arm.name, (None, ()))
        if stack is not None and not all(child.alive for child in stack.children):
            self._on_event(f"{arm.name}: a process had ended and is started again")
            self.drop(arm.name)
            stack = None
        try:
            if stack is None:
                stack = self._start(arm, wanted)
            elif current != wanted:
                stack.restart_scheduler(wanted)
                stack.wait_ready(self._config.ready_timeout_s)
        except StackError as error:
            self.drop(arm.name)
            raise BenchError(f"{arm.title}: {error} (logs are in {self._logs})") from None
        self._stacks.pop(arm.name, None)
        self._stacks[arm.name] = (stack, wanted)
        return stack

    def drop(self, name: str) -> None:
        """End the stack of an arm, if there is one: what it is asked next begins with a new one."""
        if name in self._stacks:
            self._stacks.pop(name)[0].stop()

    def close(self) -> None:
        """End all."""
        for name in list(self._stacks):
            self.drop(name)

    def _start(self, arm: Arm, scheduler_args: tuple[str, ...]) -> Stack:
        """Start a stack; the least recently used are ended first until another one fits into memory."""
        wanted = _GROWTH * self._stack_bytes + _SPARE_BYTES
        while self._stacks and psutil.virtual_memory().available < wanted:
            name = next(iter(self._stacks))
            self.drop(name)
            self._on_event(f"{name}: ended to make room in memory; it is started again when its turn comes")
        config = self._config
        stack = Stack(
            StackConfig(
                model=config.model,
                scheduler_args=scheduler_args,
                worker_args=config.worker_args(arm),
                folder=self._logs / arm.name,
            )
        )
        try:
            stack.start()
            stack.wait_ready(config.ready_timeout_s)
        except BaseException:
            stack.stop()
            raise
        resident_bytes = sum(tree_bytes(child.process.pid) for child in stack.children)
        self._stack_bytes = max(self._stack_bytes, resident_bytes)
        return stack
