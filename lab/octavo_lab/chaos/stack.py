"""The processes under attack, started again when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from subprocess import Popen
from typing import Final, cast

import grpc.aio
import psutil
from octavo.aio import AsyncClient
from octavo.errors import OctavoError
from octavo.stack import Child, Stack, StackConfig, StackError, free_ports, listens
from octavo.status import Status
from octavo.v1 import operations_pb2 as ops
from octavo.v1 import operations_pb2_grpc as ops_grpc

from octavo_lab.chaos.links import Links, Namespaces, ProxyLinks

_VLLM: Final = "--runner vllm --enforce-eager --max-num-batched-tokens 512 --max-model-len 1024"
RUNNERS: Final = {
    "sim": ("sim", ("--runner", "sim", "--sim-speed", "2")),
    "torch": ("demo", ("--num-threads", "1", "--dtype", "float32")),
    "vllm": ("demo", (*_VLLM.split(), "--dtype", "float32")),
}
"""Model and flags of the workers. In float32, outputs do not depend on the batch."""
POISON: Final = {"sim": 2, "demo": 49_000}
"""A token that no answer of the model has; of the simulated one, that of the end."""
_RESTART_S: Final = 0.3
_POLL_S: Final = 0.1
_ASK_S: Final = 2.0
_IDLE_S: Final = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many of each there are, and what the workers run."""

    runner: str = "sim"
    workers: int = 2
    schedulers: int = 2
    gateways: int = 2
    netns: bool = False
    watchdog_s: float = 3.0
    """A worker that owes a report for longer is lost."""
    model: str | None = None
    """Of the workers; None: as RUNNERS says."""
    worker_args: Sequence[str] = ()


class ChaosStack(Stack):
    """Workers, schedulers and gateways, with links in between that can be cut."""

    def __init__(self, sizes: Sizes, namespaces: Namespaces | None, *, poisoned: bool) -> None:
        model, flags = RUNNERS[sizes.runner]
        self.spares = sizes.runner != "sim"
        """Processes take long to start then: the last one of a kind that serves is not taken away."""
        self.poison = POISON[model] if poisoned else None
        model = sizes.model or model
        poison_flags = ("--poison-token", str(self.poison)) if poisoned else ()
        common = ("--max-num-seqs", "32", "--enable-faults")
        worker_args = (*flags, *common, *poison_flags, *sizes.worker_args)
        super().__init__(StackConfig(model=model, num_workers=sizes.workers, worker_args=worker_args))
        self._namespaces = namespaces
        ports = iter(free_ports(sizes.schedulers * (2 + sizes.workers) + sizes.gateways))
        if namespaces is not None:
            here = len(self.config.host) + 1
            for index, worker in enumerate(self.workers):
                address = namespaces.address(index, int(worker.address[here:]))
                words = f"worker --listen {address} --insecure --metrics-port none --model"
                arguments = [*words.split(), model]
                self.workers[index] = self._child(worker.name, address, [*arguments, *worker_args])
        at = self.config.host
        self._schedulers: list[Child] = []
        fronts = [(next(ports), f"{at}:{next(ports)}") for _ in range(sizes.schedulers)]
        self.links = list(fronts)
        for index, (_, address) in enumerate(fronts):
            links = [(next(ports), worker.address) for worker in self.workers]
            addresses = [worker for _, worker in links]
            if namespaces is None:
                self.links += links
                addresses = [f"{at}:{port}" for port, _ in links]
            words = f"scheduler --listen {address} --workers {','.join(addresses)} --metrics-port none"
            words += f" --enable-faults --step-watchdog-s {sizes.watchdog_s}"
            words += f" --rank {index} --advertise {at}:{fronts[index][0]}"
            self._schedulers.append(self._child(f"scheduler-{index}", address, words.split()))
        self._doors = [f"{at}:{port}" for port, _ in fronts]
        self.gateways = []
        for index in range(sizes.gateways):
            address = f"{at}:{next(ports)}"
            words = f"gateway --listen {address} --endpoint {self.endpoints}"
            self.gateways.append(self._child(f"gateway-{index}", address, words.split()))
        self.doomed: dict[str, float] = {}
        """When a process was last ended on purpose, or stopped, by name; monotonic seconds."""
        self._back: dict[str, float] = {}
        """When it was last seen to serve again, or went on."""
        self._starting: set[str] = set()
        self.deaths: list[str] = []
        """Of processes that nobody had ended."""

    @property
    def schedulers(self) -> list[Child]:
        """The preferred one first."""
        return self._schedulers

    @property
    def endpoints(self) -> str:
        """Where clients find the schedulers, in this order: behind links that can be cut."""
        return ",".join(self._doors)

    @property
    def children(self) -> list[Child]:
        """As in Stack."""
        return [*self.gateways, *self.schedulers, *self.workers]

    def launch(self, child: Child) -> None:
        """Start a process, where it belongs."""
        self._starting.add(child.name)
        if self._namespaces is not None and child in self.workers:
            with self._namespaces.inside(self.workers.index(child)):
                child.start()
        else:
            child.start()

    def start(self) -> None:
        """As in Stack."""
        for child in (*self.workers, *self.schedulers, *self.gateways):
            self.launch(child)

    def strike(self, child: Child) -> None:
        """Note that what becomes of a process now is our doing."""
        self.doomed[child.name] = time.monotonic()

    def revive(self, child: Child) -> None:
        """Let a process go on that was stopped."""
        send(child, signal.SIGCONT)
        if child.name not in self._starting:
            self._back[child.name] = time.monotonic()

    def was_away(self, child: Child, since: float) -> bool:
        """Return whether a process has been ended or stopped at any moment since a time, by us."""
        struck_at, back_at = self.doomed.get(child.name), self._back.get(child.name, 0.0)
        return struck_at is not None and (back_at < struck_at or since < back_at)

    async def keep_running(self) -> None:
        """Start what dies again, a moment later; note what died of itself."""
        due: dict[str, float] = {}
        while True:
            now = time.monotonic()
            self._note_those_back()
            for child in self.children:
                if child.alive:
                    continue
                if child.name not in due:
                    due[child.name] = now + _RESTART_S
                    if self.doomed.get(child.name, 0.0) < now - _IDLE_S or child.process.returncode > 0:
                        self.deaths.append(child.account())
                elif now >= due[child.name]:
                    del due[child.name]
                    self.launch(child)
            await asyncio.sleep(_POLL_S)

    def _note_those_back(self) -> None:
        for child in self.children:
            # A worker may live where nothing can be reached: the schedulers tell of it.
            if child.name in self._starting and (child in self.workers or listens(child.address)):
                self._starting.discard(child.name)
                self._back[child.name] = time.monotonic()

    async def statuses(self) -> list[Status | None]:
        """Ask each scheduler, past the links; None for one that does not answer."""

        async def ask(child: Child) -> Status | None:
            try:
                async with (
                    asyncio.timeout(_ASK_S),
                    AsyncClient(child.address, connect_timeout=_POLL_S) as client,
                ):
                    return await client.status()
            except (OctavoError, TimeoutError):
                return None

        return await asyncio.gather(*map(ask, self.schedulers))

    async def has_another(self, child: Child) -> bool:
        """Return whether another process of its kind serves: a worker when some scheduler has it."""
        if child in self.workers:
            told = [status for status in await self.statuses() if status is not None]
            ready = {one.worker_id for status in told for one in status.workers if one.state == "ready"}
            return bool(ready - {child.address})
        kind = self.schedulers if child in self.schedulers else self.gateways
        return any(one.alive and one.name not in self._starting for one in kind if one is not child)

    async def settled(
        self, timeout_s: float, *, idle: bool = True, without: Popen[bytes] | None = None
    ) -> list[Status]:
        """Return what the schedulers say once all processes serve, and this one has ended.

        Unless told otherwise, nothing runs by then, either.

        Raises:
            StackError: it does not come to that in time; says what is in the way.
        """
        give_up_at = time.monotonic() + timeout_s
        while True:
            told = await self.statuses()
            self._note_those_back()
            answering = [status for status in told if status is not None]
            ready = [one for status in answering for one in status.workers if one.state == "ready"]
            live = sum(status.live_requests for status in answering)
            active = sum(one.pool.active - one.pool.pinned for one in ready)
            complete = len(answering) == len(told) and len(ready) == len(self.workers) and not self._starting
            ended = without is None or without.poll() is not None
            if complete and ended and not (idle and (live or active)):
                return answering
            if time.monotonic() > give_up_at:
                states = {
                    child.name: status and {one.address: one.state for one in status.workers}
                    for child, status in zip(self.schedulers, told, strict=True)
                }
                raise StackError(f"not idle: {live} live requests, {active} active blocks, workers {states}")
            await asyncio.sleep(3 * _POLL_S)

    async def inject(self, worker: Child, *faults: ops.Fault) -> bool:
        """Put faults in force on a worker, beside poison; return whether a scheduler could tell it."""
        request = ops.SetFaultsRequest(worker_id=worker.address, faults=faults)
        if self.poison is not None:
            request.faults.add(kind=ops.FAULT_KIND_CRASH, token_id=self.poison)
        for scheduler in self.schedulers:
            async with grpc.aio.insecure_channel(scheduler.address) as channel:
                stub = cast("ops_grpc.OperationsAsyncStub", ops_grpc.OperationsStub(channel))
                try:
                    await stub.SetFaults(request, timeout=_ASK_S)
                except grpc.aio.AioRpcError:
                    continue
                return True
        return False

    def resources(self) -> dict[str, tuple[int, int]]:
        """Return resident bytes and open descriptors of each process that runs, by name."""
        found = {}
        for child in self.children:
            try:
                process = psutil.Process(child.process.pid)
                found[child.name] = (process.memory_info().rss, process.num_fds())
            except psutil.Error:
                continue
        return found


def send(child: Child, number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started."""
    if child.alive:
        os.killpg(child.process.pid, number)


@contextmanager
def running(sizes: Sizes, *, poisoned: bool = False) -> Iterator[tuple[ChaosStack, Links]]:
    """A stack that was started, and its links. Poisoned: its workers die of the token `POISON`."""
    with ExitStack() as held:
        namespaces = held.enter_context(Namespaces(sizes.workers)) if sizes.netns else None
        stack = ChaosStack(sizes, namespaces, poisoned=poisoned)
        proxy = held.enter_context(ProxyLinks(stack.links))
        held.enter_context(stack)
        yield stack, namespaces or proxy
