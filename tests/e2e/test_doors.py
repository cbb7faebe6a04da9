"""Every method and route against everybody who may not use it: refused with the right code, and nothing else.

Methods and routes are those that the ports themselves name, so a new one is here from its first day.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.keys import new_key
from octavo.service.status import ERROR_KEY
from octavo.service.tls import Tls
from octavo.v1 import generation_pb2 as pb

from tests.doors import methods_of
from tests.e2e.scheduler_stack import error_of
from tests.e2e.secured_stack import Secured, secured

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
HEALTH = "/grpc.health.v1.Health/"
OPERATORS = ("/octavo.v1.Operations/", "/grpc.channelz.v1.Channelz/")
FIGURES = {"/octavo.v1.Operations/GetStatus", "/octavo.v1.Operations/WatchStatus"}
OPEN_ROUTES = {"/health"}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as stack:
        yield stack


def bearer(key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key is not None else ()


async def outcome(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> tuple[grpc.StatusCode, str]:
    """Call a method with nothing, and return code and reason; a message that comes is a failure by itself."""
    call: Any = channel.stream_stream(method)(metadata=metadata, timeout=WAIT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    told = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), error_of(caught.value).reason if ERROR_KEY in told else ""


async def all_methods(stack: Secured, port: str) -> list[str]:
    name, key = (
        ("scheduler", stack.stack.worker_secret) if port == "worker" else ("client", stack.keys["boss"])
    )
    async with stack.channel(stack.ports[port], name) as channel:
        return await methods_of(channel, bearer(key))


def routes() -> list[tuple[str, str]]:
    """All methods and paths of the gateway, those of its documents too."""
    application: Any = create_app(GatewaySettings.load({}))
    found = []
    for route in application._app.routes:
        path = route.path.replace("{name:path}", "some/model")
        found += [(method, path) for method in route.methods]
    return found


async def test_ports_name_all_that_they_serve(stack: Secured) -> None:
    methods = {
        port: {method.rpartition("/")[2] for method in await all_methods(stack, port)} for port in stack.ports
    }
    common = {"Check", "Watch", "GetServers", "GetTopChannels", "ServerReflectionInfo"}
    assert methods["scheduler"] >= common | {"Generate", "Session", "Drain", "SetFaults", "PinPrefix"}
    assert methods["worker"] >= common | {"Describe", "Attach", "Audit", "InjectFaults"}
    paths = {path for _, path in routes()}
    assert paths >= {"/v1/completions", "/metrics", "/health", "/docs", "/openapi.json"}


async def test_scheduler_refuses_whoever_has_no_key_for_it(stack: Secured) -> None:
    strangers = {
        "no key": ((), UNAUTHENTICATED, "NO_API_KEY"),
        "wrong": (bearer(new_key()), UNAUTHENTICATED, "BAD_API_KEY"),
        "no key by its form": (bearer("sk-something"), UNAUTHENTICATED, "BAD_API_KEY"),
        "revoked": (bearer(stack.keys["former"]), UNAUTHENTICATED, "BAD_API_KEY"),
        "two": ((*bearer(stack.keys["user"]), *bearer(stack.keys["boss"])), UNAUTHENTICATED, "BAD_API_KEY"),
        "the workers'": (bearer(stack.stack.worker_secret), UNAUTHENTICATED, "BAD_API_KEY"),
    }
    async with stack.channel(stack.stack.endpoint) as channel:
        for method in await all_methods(stack, "scheduler"):
            if method.startswith(HEALTH):
                continue
            for who, (metadata, code, reason) in strangers.items():
                assert await outcome(channel, method, metadata) == (code, reason), (method, who)
            lesser = []
            if method.startswith(OPERATORS):
                lesser = ["user", "gateway"] if method in FIGURES else ["user", "gateway", "watcher"]
            for name in lesser:
                assert await outcome(channel, method, bearer(stack.keys[name])) == (
                    DENIED,
                    "ROLE_REQUIRED",
                ), method


async def test_key_of_another_role_runs_no_request(stack: Secured) -> None:
    request = pb.GenerateRequest(text="hello").SerializeToString()
    async with stack.channel(stack.stack.endpoint) as channel:
        for name in ("boss", "watcher", "gateway"):
            call: Any = channel.unary_stream("/octavo.v1.Generation/Generate")(
                request, metadata=bearer(stack.keys[name]), timeout=WAIT_S
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), error_of(caught.value).reason) == (DENIED, "ROLE_REQUIRED")


async def test_worker_refuses_whoever_has_no_secret(stack: Secured) -> None:
    strangers = {"none": (), "wrong": bearer("x" * 43), "an operator's key": bearer(stack.keys["boss"])}
    # The certificate of the scheduler itself does not do without the secret.
    async with stack.channel(stack.ports["worker"], "scheduler") as channel:
        for method in await all_methods(stack, "worker"):
            for who, metadata in strangers.items():
                if not method.startswith(HEALTH):
                    found = await outcome(channel, method, metadata)
                    assert found == (UNAUTHENTICATED, "NO_WORKER_SECRET"), (method, who)


@asynccontextmanager
async def _plaintext(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize("port", ["scheduler", "worker"])
@pytest.mark.parametrize("who", ["no certificate", "another authority's", "expired", "plaintext"])
async def test_grpc_port_opens_to_no_connection_without_a_good_certificate(
    who: str, port: str, stack: Secured
) -> None:
    address = stack.ports[port]
    opened = {
        "no certificate": lambda: stack.channel(address, None),
        "another authority's": lambda: stack.channel(address, "client", "other"),
        "expired": lambda: stack.channel(address, "expired"),
        "plaintext": lambda: _plaintext(address),
    }[who]()
    good = bearer(stack.stack.worker_secret if port == "worker" else stack.keys["boss"])
    async with opened as channel:
        for method in await all_methods(stack, port):
            assert await outcome(channel, method, good) == (UNAVAILABLE, ""), method


async def test_client_talks_to_no_port_that_is_not_of_its_authority(stack: Secured) -> None:
    other = Tls(ca=stack.folder / "other" / "ca.pem").read()
    async with grpc.aio.secure_channel(stack.stack.endpoint, other.credentials()) as channel:
        assert await outcome(channel, "/octavo.v1.Generation/ListModels", bearer(stack.keys["user"])) == (
            UNAVAILABLE,
            "",
        )


# HTTP --------------------------------------------------------------------------------------------


def client(
    stack: Secured, address: str, name: str | None = "client", authority: str = ""
) -> httpx.AsyncClient:
    tls = (
        stack.tls()
        if name is None
        else Tls(
            ca=stack.folder / "ca.pem",
            cert=stack.folder / authority / f"{name}.pem",
            key=stack.folder / authority / f"{name}-key.pem",
        )
    )
    if name is None:
        tls = Tls(ca=tls.ca)
    return httpx.AsyncClient(base_url=f"https://{address}", verify=tls.ssl_context(), timeout=WAIT_S)


def gateway(stack: Secured) -> str:
    assert stack.stack.gateway is not None
    return stack.stack.gateway.address


async def test_gateway_refuses_whoever_has_no_key(stack: Secured) -> None:
    headers = {
        "no key": {},
        "wrong": {"authorization": f"Bearer {new_key()}"},
        "no key by its form": {"authorization": "Bearer sk-something"},
        "another scheme": {"authorization": f"Basic {stack.keys['user']}"},
        "revoked": {"authorization": f"Bearer {stack.keys['former']}"},
    }
    async with client(stack, gateway(stack)) as http:
        for method, path in routes():
            for who, given in headers.items():
                answer = await http.request(
                    method, path, headers=given, json={} if method == "POST" else None
                )
                if path in OPEN_ROUTES:
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path, who)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key", (path, who)
        for name, status in (("user", 403), ("gateway", 403), ("watcher", 200), ("boss", 200)):
            given = {"authorization": f"Bearer {stack.keys[name]}"}
            assert (await http.get("/metrics", headers=given)).status_code == status, name


async def test_metrics_of_the_scheduler_want_a_key(stack: Secured) -> None:
    async with client(stack, f"127.0.0.1:{stack.metrics_ports['scheduler']}") as http:
        for name in (None, "user", "gateway", "former"):
            headers = {"authorization": f"Bearer {stack.keys[name]}"} if name else {}
            answer = await http.get("/metrics", headers=headers)
            assert (answer.status_code, answer.content) == (401, b""), name
        for name in ("watcher", "boss"):
            answer = await http.get("/metrics", headers={"authorization": f"Bearer {stack.keys[name]}"})
            assert answer.status_code == 200
            assert "octavo_requests" in answer.text or "octavo_" in answer.text


@pytest.mark.parametrize("port", ["gateway", "scheduler", "worker"])
@pytest.mark.parametrize("who", ["no certificate", "another authority's", "expired", "plaintext"])
async def test_http_port_opens_to_no_connection_without_a_good_certificate(
    who: str, port: str, stack: Secured
) -> None:
    address = gateway(stack) if port == "gateway" else f"127.0.0.1:{stack.metrics_ports[port]}"
    opened = {
        "no certificate": lambda: client(stack, address, None),
        "another authority's": lambda: client(stack, address, "client", "other"),
        "expired": lambda: client(stack, address, "expired"),
        "plaintext": lambda: httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S),
    }[who]()
    paths = routes() if port == "gateway" else [("GET", "/metrics")]
    headers = {"authorization": f"Bearer {stack.keys['boss']}"}
    async with opened as http:
        for method, path in paths:
            # Its library lets some errors of TLS pass as they are.
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http.request(method, path, headers=headers)


async def test_tls_to_a_port_in_plaintext_ends_without_a_word(stack: Secured) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with stack.channel(address) as channel:
        assert await outcome(channel, "/octavo.v1.Generation/ListModels", bearer(stack.keys["user"])) == (
            UNAVAILABLE,
            "",
        )
    async with client(stack, address) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/health")
    server.close()
