"""Certificates, their authority, keys and the workers' secret are replaced under load: no request fails."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from octavo import AsyncClient, OctavoError
from octavo.cli.main import main
from octavo.keys import new_key
from octavo.service.authority import Authority
from octavo.service.private import write_private
from octavo.stack import Child

from tests.e2e.scheduler_stack import until
from tests.e2e.secured_stack import HOSTS, SIM, YEAR, Secured, secured

CLIENTS = 6
FAST = ("--sim-speed", "20")


@dataclass
class Load:
    """Clients that connect anew for every few requests, at both doors."""

    stack: Secured
    key: str
    answered: int = 0
    connections: int = 0
    failures: list[str] = field(default_factory=list)
    _rounds: dict[int, int] = field(default_factory=dict)

    async def run(self, number: int) -> None:
        while True:
            try:
                await (self._ask_gateway if number % 3 == 0 else self._ask_scheduler)()
            except (OctavoError, httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._rounds[number] = self._rounds.get(number, 0) + 1

    async def _ask_scheduler(self) -> None:
        async with AsyncClient(self.stack.stack.endpoint, api_key=self.key, tls=self.stack.tls()) as client:
            self.connections += 1
            for _ in range(3):
                result = await client.generate("hello", max_tokens=8, ignore_eos=True)
                assert result.usage.completion_tokens == 8
                self.answered += 1

    async def _ask_gateway(self) -> None:
        assert self.stack.stack.gateway is not None
        url = f"https://{self.stack.stack.gateway.address}"
        context = await self._consistent()
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=url, verify=context, headers=headers, timeout=60) as http:
            self.connections += 1
            body = {"model": "sim", "prompt": "hello", "max_tokens": 8}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            self.answered += 1

    async def _consistent(self) -> ssl.SSLContext:
        """The client's own files, once a certificate and its key are those of each other."""
        while True:
            try:
                return self.stack.tls().ssl_context()
            except OSError:
                await asyncio.sleep(0)

    async def around(self) -> None:
        """Wait until every client has connected anew twice."""
        before = dict(self._rounds)
        await until(lambda: all(self._rounds.get(one, 0) > before.get(one, 0) + 1 for one in range(CLIENTS)))
        assert self.failures == []


async def _all_ready(stack: Secured, client: AsyncClient) -> bool:
    workers = (await client.status()).workers
    return sum(one.state == "ready" for one in workers) == len(stack.stack.workers)


@asynccontextmanager
async def loaded(stack: Secured) -> AsyncIterator[Load]:
    load = Load(stack, stack.keys["user"])
    tasks = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
    try:
        await load.around()
        yield load
        await load.around()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attach_anew(stack: Secured, worker: Child) -> None:
    """Kill a worker, so that its scheduler must connect to it as things are now."""
    worker.kill()
    worker.start()
    async with AsyncClient(stack.stack.endpoint, api_key=stack.keys["boss"], tls=stack.tls()) as client:
        await until(lambda: _all_ready(stack, client))


async def test_everything_that_opens_a_door_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    with secured(tmp_path, num_workers=2, worker_args=(*SIM, *FAST)) as stack:
        async with loaded(stack) as load:
            steps: list[Callable[[Load], Awaitable[None]]] = [certificates, authority, keys, workers_secret]
            for step in steps:
                await step(load)
                await attach_anew(stack, stack.stack.workers[steps.index(step) % 2])
                await load.around()
        assert load.failures == []
        assert load.answered > load.connections > 100


async def certificates(load: Load) -> None:
    """New certificates of the same authority."""
    for _ in range(3):
        Authority.load(load.stack.folder).issue_all(load.stack.folder, HOSTS, YEAR)
        await load.around()


async def authority(load: Load) -> None:
    """Another authority: trusted beside the old one, then used, then trusted alone."""
    folder = load.stack.folder
    old, fresh = (folder / "ca.pem").read_bytes(), Authority.create("the next authority")
    (folder / "next").mkdir()
    fresh.save(folder / "next")
    new = (folder / "next" / "ca.pem").read_bytes()
    for trusted, issuer in ((old + new, None), (old + new, fresh), (new, None)):
        write_private(folder / "ca.pem", trusted)
        await load.around()
        if issuer is not None:
            issuer.issue_all(folder, HOSTS, YEAR)
            await load.around()


async def keys(load: Load) -> None:
    """A new key by `octavo keys rotate`, then the old one revoked."""
    path = str(load.stack.folder / "keys.toml")
    former = load.key
    load.key = load.stack.keys["user"] = await rotated(path, "user", load.stack)
    await load.around()
    assert main(["keys", "revoke", path, "user.old"]) == 0
    await until_known(load.stack, former, known=False)


async def workers_secret(load: Load) -> None:
    """The new one accepted beside the old one, then presented, then alone."""
    path = load.stack.stack.folder / "worker-secret"
    old, new = load.stack.stack.worker_secret, new_key()
    for number, lines in enumerate(((old, new), (new, old), (new,))):
        write_private(path, "\n".join(lines))
        await attach_anew(load.stack, load.stack.stack.workers[number % 2])
        await load.around()


async def rotated(path: str, name: str, stack: Secured) -> str:
    """Rotate a key by the command, as an operator would, and return the new one once it is known."""
    command = (sys.executable, "-m", "octavo.cli.main", "keys", "rotate", path, name)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    key = told.decode().strip()
    await until_known(stack, key, known=True)
    return key


async def until_known(stack: Secured, key: str, *, known: bool) -> None:
    """Wait until both doors know a key, or do not any more."""
    assert stack.stack.gateway is not None
    headers = {"authorization": f"Bearer {key}"}
    url = f"https://{stack.stack.gateway.address}"
    async with (
        AsyncClient(stack.stack.endpoint, api_key=key, tls=stack.tls()) as client,
        httpx.AsyncClient(base_url=url, verify=stack.tls().ssl_context(), headers=headers) as http,
    ):

        async def agreed() -> bool:
            try:
                await client.models()
                at_scheduler = True
            except OctavoError:
                at_scheduler = False
            at_gateway = (await http.get("/v1/models")).status_code == 200
            return at_scheduler == at_gateway == known

        await until(agreed)
