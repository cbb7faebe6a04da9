"""Every method and route against everybody who may not use it: refused with the right code, and nothing else.

Methods and routes are those that the ports themselves name, so a new one is here from its first day: it has
to be refused; where the key of any tenant opens it, a test has to hold tenants apart (`OF_TENANTS`); and the
table of docs/security.md has to have it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import httpx
import pytest
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.keys import new_key
from octavo.service.metrics_port import MetricsPort
from octavo.service.status import ERROR_KEY, STATUS_KEY
from octavo.service.tls import Tls
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb
from prometheus_client import CollectorRegistry

from tests.doors import methods_of
from tests.e2e.gateway_stack import gateway
from tests.e2e.scheduler_stack import WAIT_S, error_of, scheduler, start_worker
from tests.e2e.secured_stack import Secured, secured, tls_of

ROOT = Path(__file__).parents[2]
HEALTH, REFLECTION = "/grpc.health.v1.Health", "/grpc.reflection.v1alpha.ServerReflection"
FOR_ANY_KEY = ("/octavo.v1.Generation", REFLECTION)
KEYS = ("no key", "wrong key", "revoked key", "another tenant's", "inference key")
CONNECTIONS = ("no certificate", "another CA's", "expired", "plaintext to TLS", "TLS to plaintext")
OPEN, OWN_ONLY, NO_CONNECTION = "open", "own only", "no connection"

_ACCESS, _GATEWAY = "tests/e2e/test_scheduler_access.py::", "tests/e2e/test_tenants.py::"
NOTHING = "holds nothing of a tenant"
_SAME_ID = f"{_GATEWAY}test_tenants_of_one_gateway_may_give_requests_the_same_id"
OF_TENANTS = {
    "/octavo.v1.Generation/Generate": f"{_ACCESS}test_tenants_share_no_cached_prefix",
    "/octavo.v1.Generation/Session": f"{_ACCESS}test_tenant_cannot_name_or_cancel_a_request_of_another",
    "/octavo.v1.Generation/ListModels": f"{_ACCESS}test_what_a_tenant_is_told_names_no_other",
    "/octavo.v1.Generation/Tokenize": NOTHING,
    "/octavo.v1.Generation/Detokenize": NOTHING,
    f"{REFLECTION}/ServerReflectionInfo": NOTHING,
    "POST /v1/completions": _SAME_ID,
    "POST /v1/chat/completions": _SAME_ID,
    "POST /v1/messages": _SAME_ID,
    "POST /v1/responses": f"{_GATEWAY}test_response_of_another_tenant_cannot_be_continued",
    "POST /v1/messages/count_tokens": NOTHING,
    "GET /v1/models": f"{_GATEWAY}test_gateway_names_no_tenant_to_another",
    "GET /v1/models/some/model": f"{_GATEWAY}test_gateway_names_no_tenant_to_another",
    "POST /tokenize": NOTHING,
    "POST /detokenize": NOTHING,
    "GET /version": NOTHING,
    "GET /docs": NOTHING,
    "HEAD /docs": NOTHING,
    "GET /docs/oauth2-redirect": NOTHING,
    "HEAD /docs/oauth2-redirect": NOTHING,
    "GET /openapi.json": NOTHING,
    "HEAD /openapi.json": NOTHING,
}
"""What the key of any tenant opens, and the test that it opens nothing of another's."""


@dataclass(frozen=True)
class Door:
    """A method (`/package.Service/Method`) or a route (`GET /path`) of a port."""

    port: str
    name: str

    @property
    def group(self) -> str:
        return f"{self.port}, {self.name.split('/')[1]}" if self.name.startswith("/") else self.port

    @property
    def short(self) -> str:
        return self.name.rpartition("/")[2] if self.name.startswith("/") else self.name

    @property
    def path(self) -> tuple[str, str]:
        method, _, path = self.name.partition(" ")
        return method, path


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as stack:
        yield stack


def bearer(key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key is not None else ()


# The doors, as they say themselves -------------------------------------------------------------------


async def all_methods(stack: Secured, port: str) -> list[str]:
    name, key = (
        ("scheduler", stack.stack.worker_secret) if port == "worker" else ("client", stack.keys["boss"])
    )
    async with stack.channel(stack.ports[port], name) as channel:
        return await methods_of(channel, bearer(key))


def routes() -> list[str]:
    """All methods and paths of the gateway, those of its documents too."""
    application: Any = create_app(GatewaySettings.load({}))
    return [
        f"{method} {route.path.replace('{name:path}', 'some/model')}"
        for route in application._app.routes
        for method in sorted(route.methods)
    ]


async def all_doors(stack: Secured) -> list[Door]:
    doors = [Door(port, method) for port in stack.ports for method in await all_methods(stack, port)]
    doors += [Door("gateway", route) for route in routes()]
    # These answer every path alike.
    doors += [Door(f"{port}'s metrics", f"GET {path}") for port in stack.ports for path in ("/metrics", "/")]
    return doors


# What they answer ------------------------------------------------------------------------------------


async def called(channel: grpc.aio.Channel, method: str, metadata: Any) -> str:
    """Call a method with an empty message; return code and reason, or OWN_ONLY if it is let in."""
    # The stubs want serializers.
    call = cast("Any", channel).unary_stream(method)(b"", metadata=metadata, timeout=WAIT_S)
    with suppress(grpc.aio.AioRpcError):
        if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lag
            # A watch does not end; what answers once has let us in.
            call.cancel()
            return OWN_ONLY
    code, told = await call.code(), dict(await call.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE:
        assert told == {}
        return NO_CONNECTION
    if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return OWN_ONLY
    assert set(told) <= {ERROR_KEY, STATUS_KEY}, "a refusal says why, and no more"
    return f"{code.name} {common_pb2.Error.FromString(told[ERROR_KEY]).reason}"


async def asked(http: httpx.AsyncClient, door: Door, metadata: Any) -> str:
    """Ask for a route; return the status, or OWN_ONLY if it is let in."""
    method, path = door.path
    try:
        answer = await http.request(
            method, path, headers=dict(metadata), json={} if method == "POST" else None
        )
    except (httpx.TransportError, ssl.SSLError):  # httpx lets some errors of TLS pass as they are
        return NO_CONNECTION
    if answer.status_code not in (401, 403):
        return OWN_ONLY
    assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)
    if door.port == "gateway" and method != "HEAD":
        assert set(answer.json()) <= {"error", "type", "request_id"}, "a refusal says why, and no more"
        assert set(answer.json()["error"]) <= {"message", "type", "param", "code"}
    else:
        assert answer.content == b""
    return str(answer.status_code)


class Stranger:
    """Connections to all ports as somebody makes them, and the key that goes with each call."""

    def __init__(
        self,
        channels: Mapping[str, grpc.aio.Channel],
        https: Mapping[str, httpx.AsyncClient],
        keys: Mapping[str, str | None],
    ) -> None:
        self._channels = channels
        self._https = https
        self._keys = keys

    async def tries(self, door: Door) -> str:
        metadata = bearer(self._keys.get(door.port, self._keys.get("")))
        if door.port in self._channels:
            return await called(self._channels[door.port], door.name, metadata)
        return await asked(self._https[door.port], door, metadata)


def http_ports(stack: Secured) -> dict[str, str]:
    assert stack.stack.gateway is not None
    metrics = {f"{port}'s metrics": f"127.0.0.1:{number}" for port, number in stack.metrics_ports.items()}
    return {"gateway": stack.stack.gateway.address, **metrics}


@asynccontextmanager
async def strangers(stack: Secured) -> AsyncIterator[dict[str, Stranger]]:
    """Everybody in the table. Whoever has no good certificate has all the keys."""
    own = stack.tls()
    good = {"": stack.keys["boss"], "worker": stack.stack.worker_secret}
    async with AsyncExitStack() as entered, plaintext_ports() as plain:

        async def comes(
            ports: Mapping[str, str], tls: Tls | None, keys: Mapping[str, str | None]
        ) -> Stranger:
            channels, https = {}, {}
            for port, address in ports.items():
                if port in stack.ports:
                    channel = tls.read().channel(address, ()) if tls else grpc.aio.insecure_channel(address)
                    channels[port] = await entered.enter_async_context(channel)
                else:
                    url, verify = (
                        (f"https://{address}", tls.ssl_context()) if tls else (f"http://{address}", True)
                    )
                    client = httpx.AsyncClient(base_url=url, verify=verify, timeout=WAIT_S)
                    https[port] = await entered.enter_async_context(client)
            return Stranger(channels, https, keys)

        ports = {**stack.ports, **http_ports(stack)}
        with_key = partial(comes, ports, own)
        other = tls_of(stack.folder / "other", "client")
        yield {
            "no key": await with_key({}),
            "wrong key": await with_key({"": new_key(), "worker": "x" * 43}),
            "revoked key": await with_key({"": stack.keys["former"]}),
            "another tenant's": await with_key({"": stack.keys["other"]}),
            "inference key": await with_key({"": stack.keys["user"]}),
            "no certificate": await comes(ports, Tls(ca=own.ca), good),
            "another CA's": await comes(ports, Tls(ca=own.ca, cert=other.cert, key=other.key), good),
            "expired": await comes(ports, stack.tls("expired"), good),
            "plaintext to TLS": await comes(ports, None, good),
            "TLS to plaintext": await comes(plain, own, good),
        }


@asynccontextmanager
async def plaintext_ports() -> AsyncIterator[dict[str, str]]:
    """The same ports, of services that were given no certificates."""
    worker = await start_worker()
    metrics = MetricsPort(CollectorRegistry(), "127.0.0.1", 0)
    try:
        async with scheduler(worker.address) as stack, gateway(f"127.0.0.1:{stack.port}") as (_, port):
            yield {
                "scheduler": f"127.0.0.1:{stack.port}",
                "worker": worker.address,
                "gateway": f"127.0.0.1:{port}",
                "scheduler's metrics": f"127.0.0.1:{metrics.port}",
                "worker's metrics": f"127.0.0.1:{metrics.port}",
            }
    finally:
        metrics.close()
        await worker.stop()


# What they should answer -----------------------------------------------------------------------------


def expected(door: Door, who: str) -> str:
    """What the rules say; a door that is not named here is closed to whoever is no operator."""
    if who in CONNECTIONS:
        return NO_CONNECTION
    if door.name.startswith(f"{HEALTH}/") or (door.port, door.name) == ("gateway", "GET /health"):
        return OWN_ONLY
    if door.port == "worker":
        return "UNAUTHENTICATED NO_WORKER_SECRET"
    has_key = who in ("another tenant's", "inference key")
    if door.port == "scheduler":
        if has_key:
            is_for_any = door.name.rpartition("/")[0] in FOR_ANY_KEY
            return OWN_ONLY if is_for_any else "PERMISSION_DENIED ROLE_REQUIRED"
        return f"UNAUTHENTICATED {'NO' if who == 'no key' else 'BAD'}_API_KEY"
    if not has_key:
        return "401"
    return OWN_ONLY if door.port == "gateway" and door.name != "GET /metrics" else "403"


async def test_every_door_refuses_every_stranger(stack: Secured) -> None:
    doors = await all_doors(stack)
    async with strangers(stack) as everybody:
        assert tuple(everybody) == KEYS + CONNECTIONS
        found = {
            door: {who: await stranger.tries(door) for who, stranger in everybody.items()} for door in doors
        }
    wrong = {
        (door, who): answer
        for door, row in found.items()
        for who, answer in row.items()
        if answer != expected(door, who)
    }
    assert wrong == {}
    opened = {
        door.name for door, row in found.items() if row["another tenant's"] == OWN_ONLY != row["no key"]
    }
    assert opened == set(OF_TENANTS), "say for each which test holds tenants apart there"
    page = (ROOT / "docs/security.md").read_text()
    assert table_of(found) in page, f"docs/security.md wants this table:\n{table_of(found)}"


def table_of(found: Mapping[Door, Mapping[str, str]]) -> str:
    """Return the table as Markdown: doors of one group that answer alike share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for door, row in found.items():
        cells = [OPEN if row["no key"] == OWN_ONLY == row[who] else row[who] for who in KEYS]
        unconnected = ", ".join({row[who] for who in CONNECTIONS})
        lines.setdefault((door.group, *cells, unconnected), []).append(f"`{door.short}`")
    head = ("door", *KEYS, "; ".join(CONNECTIONS))
    rows = [(f"{group}: {', '.join(names)}", *cells) for (group, *cells), names in lines.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def test_tests_that_hold_tenants_apart_exist() -> None:
    for test in {*OF_TENANTS.values()} - {NOTHING}:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test


async def test_ports_name_all_that_they_serve(stack: Secured) -> None:
    methods = {
        port: {method.rpartition("/")[2] for method in await all_methods(stack, port)} for port in stack.ports
    }
    common = {"Check", "Watch", "GetServers", "GetTopChannels", "ServerReflectionInfo"}
    assert methods["scheduler"] >= common | {"Generate", "Session", "Drain", "SetFaults", "PinPrefix"}
    assert methods["worker"] >= common | {"Describe", "Attach", "Audit", "InjectFaults"}
    assert {*routes()} >= {"POST /v1/completions", "GET /metrics", "GET /health", "GET /docs"}


async def test_key_of_another_role_runs_no_request_and_changes_nothing(stack: Secured) -> None:
    request = pb.GenerateRequest(text="hello").SerializeToString()
    async with stack.channel(stack.stack.endpoint) as channel:
        for name in ("boss", "watcher", "gateway"):
            call = cast("Any", channel).unary_stream("/octavo.v1.Generation/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, metadata=bearer(stack.keys[name]), timeout=WAIT_S).read()
            assert error_of(caught.value).reason == "ROLE_REQUIRED"
        for name in ("watcher", "gateway"):
            for method in ("Drain", "SetFaults", "PinPrefix", "GetUsage"):
                answer = await called(channel, f"/octavo.v1.Operations/{method}", bearer(stack.keys[name]))
                assert answer == "PERMISSION_DENIED ROLE_REQUIRED"
        status = "/octavo.v1.Operations/GetStatus"
        assert await called(channel, status, bearer(stack.keys["watcher"])) == OWN_ONLY
        assert (
            await called(channel, status, bearer(stack.keys["gateway"])) == "PERMISSION_DENIED ROLE_REQUIRED"
        )


async def test_key_that_is_none_or_stands_twice_opens_nothing(stack: Secured) -> None:
    two = (*bearer(stack.keys["user"]), *bearer(stack.keys["boss"]))
    async with stack.channel(stack.stack.endpoint) as channel:
        for metadata in (bearer("sk-something"), two, bearer(stack.stack.worker_secret)):
            answer = await called(channel, "/octavo.v1.Generation/ListModels", metadata)
            assert answer == "UNAUTHENTICATED BAD_API_KEY"


async def test_certificate_of_a_scheduler_does_not_do_without_the_secret(stack: Secured) -> None:
    async with stack.channel(stack.ports["worker"], "scheduler") as channel:
        for key in (None, stack.keys["boss"]):
            answer = await called(channel, "/octavo.v1.Worker/Describe", bearer(key))
            assert answer == "UNAUTHENTICATED NO_WORKER_SECRET"


async def test_metrics_of_every_process_are_for_operators_and_metrics_keys(stack: Secured) -> None:
    for port, address in http_ports(stack).items():
        async with httpx.AsyncClient(verify=stack.tls().ssl_context(), timeout=WAIT_S) as http:
            for name, status in (("user", 403), ("gateway", 403), ("watcher", 200), ("boss", 200)):
                headers = dict(bearer(stack.keys[name]))
                answer = await http.get(f"https://{address}/metrics", headers=headers)
                assert answer.status_code == status, (port, name)
                assert ("octavo_" in answer.text) == (status == 200)


async def test_client_talks_to_no_port_that_is_not_of_its_authority(stack: Secured) -> None:
    files = Tls(ca=stack.folder / "other" / "ca.pem").read()
    async with files.channel(stack.stack.endpoint, ()) as channel:
        answer = await called(channel, "/octavo.v1.Generation/ListModels", bearer(stack.keys["user"]))
        assert answer == NO_CONNECTION
