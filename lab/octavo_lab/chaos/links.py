"""Links that can be cut: a TCP proxy in a process of its own, or a network namespace with its cable.

A cut loses nothing that the network would not lose: bytes wait, as TCP would send them again, and connections
that are made meanwhile come about when it is healed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

WAYS: Final = {"cut": (True, True), "cut-there": (True, False), "cut-back": (False, True)}
"""Whether requests and whether answers are held back, by kind of action."""
_NET: Final = "10.77"
_CLONE_NEWNET: Final = 0x40000000


class ProxyLinks:
    """Links through one proxy; each is (port to listen on, address that it leads to)."""

    def __init__(self, links: Sequence[tuple[int, str]]) -> None:
        self.count = len(links)
        command = [sys.executable, "-m", "octavo._child", str(os.getpid()), __name__, json.dumps(links)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, process_group=0)  # noqa: S603 # our own module

    def set(self, link: int, there: bool, back: bool) -> None:  # the two ways of a link
        """Hold back what goes there and what comes back, or let it go."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps((link, there, back)) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # Leaving it closes the pipe and waits.
            self._process.kill()


class Namespaces:
    """A network namespace for each worker, reached over a pair of virtual Ethernet devices. For root."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"oc{os.getpid() % 100_000}"

    def address(self, index: int, port: int) -> str:
        """Return an address inside a namespace."""
        return f"{_NET}.{index}.2:{port}"

    def __enter__(self) -> Self:
        for index in range(self.count):
            name, outer, inner = self._names(index)
            for words in (
                f"netns add {name}",
                f"link add {outer} type veth peer name {inner} netns {name}",
                f"addr add {_NET}.{index}.1/30 dev {outer}",
                f"link set {outer} up",
                f"-n {name} addr add {_NET}.{index}.2/30 dev {inner}",
                f"-n {name} link set {inner} up",
                f"-n {name} link set lo up",
            ):
                _ip(words)
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(self.count):
            name, outer, _inner = self._names(index)
            for words in (f"link del {outer}", f"netns del {name}"):
                with suppress(subprocess.CalledProcessError):
                    _ip(words)

    def set(self, link: int, there: bool, back: bool) -> None:  # as above
        """Let an end lose its way to the other, or have it again: nothing tells a sender."""
        name, _, _ = self._names(link)
        for held, where, peer in ((there, "", 2), (back, f"-n {name} ", 1)):
            with suppress(subprocess.CalledProcessError):  # It is so already.
                _ip(f"{where}route {'add' if held else 'del'} blackhole {_NET}.{link}.{peer}/32")

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Let this thread, and what it starts, be in a namespace."""
        enter = ctypes.CDLL(None, use_errno=True).setns
        with (
            Path("/proc/thread-self/ns/net").open("rb") as home,
            Path(f"/var/run/netns/{self._names(index)[0]}").open("rb") as other,
        ):
            for place in (other, home):
                if enter(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
                if place is other:
                    yield

    def _names(self, index: int) -> tuple[str, str, str]:
        return f"{self._tag}n{index}", f"{self._tag}a{index}", f"{self._tag}b{index}"


Links = ProxyLinks | Namespaces


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)  # noqa: S603, S607 # the system's


class _Link:
    """One listening port of the proxy."""

    def __init__(self, port: int, target: str) -> None:
        self._port = port
        self._host, _, target_port = target.rpartition(":")
        self._target_port = int(target_port)
        self.ways = (asyncio.Event(), asyncio.Event())

    def set(self, *held: bool) -> None:
        for way, shut in zip(self.ways, held, strict=True):
            way.clear() if shut else way.set()

    async def serve(self) -> None:
        self.set(False, False)
        server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, backlog=1024)
        await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for way in self.ways:
            await way.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.create_task(_pump(reader, far_writer, self.ways[0])),
            asyncio.create_task(_pump(far_reader, writer, self.ways[1])),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, far_writer):
            end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: asyncio.Event) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            await way.wait()
            writer.write(data)
            await writer.drain()
    await way.wait()  # The news of an end travel as all else does.


async def _proxy(links: Sequence[tuple[int, str]]) -> None:
    served = [_Link(port, target) for port, target in links]
    tasks = [asyncio.create_task(link.serve()) for link in served]
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        number, there, back = json.loads(line)
        served[number].set(there, back)
    del tasks


if __name__ == "__main__":
    asyncio.run(_proxy(json.loads(sys.argv[1])))
