"""What strangers, slow clients and huge bodies get at the gateway's port: an answer, and no more."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from octavo.keys import new_key

from tests.e2e.gateway_stack import Served, gateway, served
from tests.e2e.scheduler_stack import scheduler, start_worker, until
from tests.e2e.test_scheduler_access import KEYS, key_file

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}


class Raw:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, *headers: str, body: bytes = b"") -> None:
        self.send("\r\n".join((f"POST {path} HTTP/1.1", "host: x", *headers, "", "")).encode() + body)

    def get(self, path: str) -> None:
        self.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """The next answer: status, headers, JSON."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        is_json = "json" in headers["content-type"]
        return int(head[0].split()[1]), headers, json.loads(body) if is_json else body

    async def rest(self) -> bytes:
        """What comes until the connection is closed."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Served]:
    async with served() as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def locked(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A gateway of a scheduler that wants keys."""
    own = tmp_path / "own.key"
    own.write_text(KEYS["gateway"])
    worker = await start_worker()
    try:
        path = key_file(tmp_path / "keys.toml", "user", "gateway")
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with gateway(f"127.0.0.1:{stack.port}", api_key_file=own) as (http, port):
                yield http, port
    finally:
        await worker.stop()


# Keys first ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("key", [None, "sk-something", new_key()], ids=["none", "not ours", "unknown"])
async def test_without_a_good_key_the_answer_comes_before_the_body(
    locked: tuple[httpx.AsyncClient, int], path: str, key: str | None
) -> None:
    _, port = locked
    headers = ["content-type: application/json", "content-length: 4000000"]
    async with connected(port) as raw:
        raw.post(path, *headers, *([f"authorization: Bearer {key}"] if key else []), body=b'{"prompt": "')
        status, answered, body = await raw.answer()
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert answered["www-authenticate"] == "bearer"
        # What comes of the body is dropped, and the connection serves the next request.
        raw.send(b"x" * (4_000_000 - 12))
        raw.post(path, *headers[:1], f"authorization: Bearer {KEYS['user']}", "content-length: 1", body=b"{")
        status, _, body = await raw.answer()
        assert (status, body["error"]["code"]) == (400, "invalid_request")


async def test_only_a_good_key_is_told_to_go_on(locked: tuple[httpx.AsyncClient, int]) -> None:
    _, port = locked
    headers = ["content-type: application/json", "content-length: 29", "expect: 100-continue"]
    async with connected(port) as raw:
        raw.post("/v1/completions", *headers)
        status, answered, _ = await raw.answer()
        assert (status, answered["connection"]) == (401, "close")
        assert await raw.rest() == b""
    async with connected(port) as raw:
        raw.post("/v1/completions", *headers, f"authorization: Bearer {KEYS['user']}")
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(b'{"prompt":"a","max_tokens":1}')
        assert (await raw.answer())[0] == 200


async def test_no_body_is_read_where_none_belongs(one: Served) -> None:
    async with connected(one.port) as raw:
        raw.post("/v1/images/generations", "content-length: 9000000")
        assert (await raw.answer())[0] == 404
        raw.send(b"x" * 9_000_000)
        raw.post("/health", "content-length: 9000000")
        assert (await raw.answer())[0] == 405


# Bodies -------------------------------------------------------------------------------------------

USER = b'{"role":"user","content":"x"}'
MANY = 200_000


def chat(rest: bytes, messages: bytes = b"[" + USER + b"]") -> bytes:
    return b'{"messages":' + messages + b"," + rest + b"}"


def many(item: bytes, count: int = MANY) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def names(count: int) -> bytes:
    return b",".join(b'"k%d":1' % number for number in range(count))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/detokenize", b'{"tokens":' + many(b"-1", 2_600_000) + b"}", 413),
        ("/detokenize", b'{"tokens":' + many(b"-1") + b"}", 400),
        ("/detokenize", b'{"tokens":' + many(b"1e5", 20_000) + b"}", 400),
        ("/v1/completions", b'{"prompt":' + many(b"{}") + b"}", 413),
        ("/v1/completions", b'{"prompt":' + many(b"{}", 50_000) + b"}", 400),
        ("/v1/completions", b'{"prompt":' + many(b"[]", 50_000) + b"}", 400),
        ("/v1/completions", b'{"prompt":' + many(b"1")[:-1] + b',"x"]}', 400),
        ("/v1/completions", b'{"prompt":"x","' + b"a" * (4 << 20) + b'":1}', 400),
        ("/v1/completions", b'{"prompt":"x",' + names(60_000) + b"}", 413),
        ("/v1/completions", b'{"prompt":"x",' + names(30_000) + b"}", 400),
        ("/v1/completions", b'{"prompt":"x","model":"' + b"a" * (4 << 20) + b'"}', 400),
        ("/v1/completions", b'{"prompt":"x","logit_bias":{' + names(30_000) + b"}}", 400),
        ("/v1/completions", b'{"prompt":"x","stop":' + many(b'"a"') + b"}", 400),
        ("/v1/completions", b'{"prompt":"x","stop_token_ids":' + many(b"-1") + b"}", 400),
        ("/v1/completions", b'{"prompt":"x","seed":' + b"9" * 1000 + b"}", 400),
        ("/v1/completions", b'{"prompt":"x","seed":' + b"9" * (4 << 20) + b"}", 400),
        ("/v1/completions", b'{"prompt":[0.5' + b"9" * (4 << 20) + b"]}", 400),
        ("/v1/completions", b'{"prompt":"x","temperature":1e999999}', 400),
        ("/v1/completions", b'{"prompt":"x","temperature":NaN}', 400),
        ("/v1/completions", b'{"prompt":"' + b"x" * (4 << 20) + b'\xff"}', 400),
        ("/v1/completions", b'{"prompt":' + b"[" * 50_000, 400),
        ("/v1/completions", '{"prompt":"x"}'.encode("utf-16"), 400),
        ("/v1/completions", '{"prompt":"x"}'.encode("utf-32-le"), 400),
        ("/v1/chat/completions", chat(b'"n":1', many(b"{}", 50_000)), 400),
        ("/v1/chat/completions", chat(b'"n":1', many(USER, 12_000)), 400),
        ("/v1/chat/completions", chat(b'"n":1', b"[{" + names(30_000) + b"}]"), 400),
        (
            "/v1/chat/completions",
            chat(b'"n":1', b'[{"role":"user","content":[{' + names(30_000) + b"}]}]"),
            400,
        ),
        ("/v1/chat/completions", chat(b'"n":1', b'[{"role":"user","content":' + many(b"1") + b"}]"), 400),
        ("/v1/chat/completions", chat(b'"tools":' + many(b"{}", 50_000)), 400),
        ("/v1/chat/completions", chat(b'"tools":' + many(b"1")), 400),
        ("/v1/chat/completions", chat(b'"chat_template_kwargs":{"a":' + many(b"1e999", 20_000) + b"}"), 400),
        ("/v1/chat/completions", chat(b'"chat_template_kwargs":{"a":' + many(b"NaN") + b"}"), 400),
        ("/v1/chat/completions", chat(b'"chat_template_kwargs":{"a":' + b"[" * 900 + b"]" * 900 + b"}"), 400),
        (
            "/v1/chat/completions",
            chat(b'"response_format":{"type":"json_schema","json_schema":{"schema":{"a":[NaN]}}}'),
            400,
        ),
        ("/tokenize", chat(b'"tools":' + many(b"{}", 50_000)), 400),
    ],
    ids=range(35),
)
async def test_worst_bodies_are_refused_in_few_words(
    one: Served, path: str, body: bytes, status: int
) -> None:
    answer = await one.http.post(path, content=body, headers=JSON)

    assert answer.status_code == status, answer.text[:500]
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2500
    assert answer.headers["x-should-retry"] == "false"


async def test_what_is_echoed_of_headers_and_names_is_short(one: Served) -> None:
    long = "a" * 20_000
    for answer in (
        await one.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-octavo-priority": long}),
        await one.http.post("/v1/completions", json={"prompt": "x"}, headers={f"x-octavo-{long}": "1"}),
        await one.http.post("/v1/completions", content=b"x", headers={"content-type": long}),
        await one.http.get(f"/v1/models/{long}"),
    ):
        assert 400 <= answer.status_code < 500
        assert 10 < len(answer.content) < 1000


@pytest.mark.parametrize("chunked", [False, True])
async def test_routes_have_their_own_largest_body(one: Served, chunked: bool) -> None:
    body = b'{"tokens":[' + b" " * (4 << 20) + b"]}"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 18):
            yield body[start : start + (1 << 18)]

    answer = await one.http.post("/detokenize", content=pieces() if chunked else body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_compressed_body_is_refused_by_name(one: Served) -> None:
    body = gzip.compress(b'{"prompt":"' + b"x" * (100 << 20) + b'"}')
    answer = await one.http.post(
        "/v1/completions", content=body, headers={**JSON, "content-encoding": "gzip"}
    )

    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "content-encoding"


async def test_bodies_that_come_in_at_once_are_bounded_for_an_address() -> None:
    async with served(gateway_flags={"max_receiving_bytes": 15 << 20}) as one:
        async with connected(one.port) as held, connected(one.port) as raw:
            held.post("/tokenize", "content-length: 8000000", body=b"x" * 7_000_000)
            await held.writer.drain()
            raw.post("/tokenize", "content-length: 8000000", body=b"x" * 7_000_000)
            status, headers, body = await raw.answer()
            assert (status, body["error"]["code"]) == (429, "too_many_bodies")
            assert headers["retry-after"] == "1"
            assert (await one.http.get("/health")).status_code == 200
        # Who leaves frees what it held.
        assert (await one.complete(prompt="x" * 100, max_tokens=1))["choices"]


async def test_at_its_memory_ceiling_the_gateway_refuses_and_says_so() -> None:
    async with served(gateway_flags={"max_rss_bytes": 1 << 20}) as one:
        answer = await one.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "memory_ceiling")
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("1", "true")
        assert (await one.http.get("/health")).status_code == 200
        assert await one.metric("octavo_gateway_requests_total", endpoint="completions", status="503") == 1


# Connections --------------------------------------------------------------------------------------


async def test_connections_of_an_address_are_bounded_and_health_is_answered_all_the_same() -> None:
    async with served(gateway_flags={"max_connections": 6}) as one:
        async with connected(one.port) as a, connected(one.port) as b, connected(one.port) as c:
            for raw in (a, b, c):
                raw.get("/version")
                assert (await raw.answer())[0] == 200
            async with connected(one.port) as raw:
                raw.get("/health")
                assert (await raw.answer())[0] == 200
                raw.post("/v1/completions", "content-length: 2", body=b"{}")
                status, headers, body = await raw.answer()
                assert (status, body["error"]["code"]) == (429, "too_many_connections")
                assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        assert (await one.complete(prompt="x", max_tokens=1))["choices"]


async def test_every_connection_beyond_the_most_gets_a_clear_answer() -> None:
    async with served(gateway_flags={"max_connections": 2}) as one, connected(one.port) as first:
        first.get("/version")
        assert (await first.answer())[0] == 200

        async def ask() -> tuple[int, str]:
            async with connected(one.port) as raw:
                raw.post("/v1/completions", "content-length: 100000", body=b"x" * 100_000)
                status, _, body = await raw.answer()
                return status, body["error"]["code"]

        assert set(await asyncio.gather(*(ask() for _ in range(200)))) == {(429, "too_many_connections")}


@pytest.mark.parametrize("how", ["many", "one long", "long line", "half of a long one", "after a body"])
async def test_headers_are_bounded(one: Served, how: str) -> None:
    start = b"GET /version HTTP/1.1\r\nhost: x\r\n"
    data = {
        "many": start + b"a: b\r\n" * 1_000_000,
        "one long": start + b"a: " + b"b" * 4_000_000 + b"\r\n\r\n",
        "long line": b"GET /" + b"a" * 4_000_000 + b" HTTP/1.1\r\n\r\n",
        "half of a long one": start + b"a: " + b"b" * 400_000,
        "after a body": b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        + b"a: b\r\n" * 1_000_000,
    }[how]
    async with connected(one.port) as raw:
        raw.send(data)
        status, _, body = await raw.answer()
        assert (status, body["error"]["code"]) == (431, "headers_too_large")


async def test_headers_have_a_time_to_come_and_silence_ends() -> None:
    async with served(gateway_flags={"head_timeout_s": 0.2}) as one:
        async with connected(one.port) as silent, connected(one.port) as half, connected(one.port) as drip:
            half.send(b"GET /version HTTP/1.1\r\nhost: x\r\n")
            drip.get("/version")
            assert (await drip.answer())[0] == 200
            drip.send(b"\r\n")
            status, headers, body = await half.answer()
            assert (status, body["error"]["code"], headers["connection"]) == (408, "headers_timeout", "close")
            assert await half.rest() == await silent.rest() == await drip.rest() == b""
        # One that waits for its answer is not silent.
        async with connected(one.port) as raw:
            one.worker.gate.close()
            body = b'{"prompt":"a","max_tokens":1}'
            raw.post(
                "/v1/completions", "content-type: application/json", f"content-length: {len(body)}", body=body
            )
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(raw.reader.read(1), 0.5)
            one.worker.gate.open()
            assert (await raw.answer())[0] == 200


async def test_body_of_a_refused_request_may_not_take_for_ever() -> None:
    async with served(gateway_flags={"read_timeout_s": 0.2}) as one:
        async with connected(one.port) as raw:
            raw.post("/nowhere", "content-length: 100", body=b"x")
            assert (await raw.answer())[0] == 404
            assert await raw.rest() == b""
        async with connected(one.port) as raw:
            raw.post("/tokenize", "content-length: 100", body=b"x")
            status, _, body = await raw.answer()
            assert (status, body["error"]["code"]) == (408, "body_timeout")


async def test_requests_before_the_first_answer_are_bounded_and_answered_in_order(one: Served) -> None:
    async with connected(one.port) as raw:
        raw.send(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        closing = False
        answers = 0
        while not closing:
            status, headers, body = await raw.answer()
            assert (status, set(body)) == (200, {"version"})
            closing = headers.get("connection") == "close"
            answers += 1
        assert answers == 17
        assert await raw.rest() == b""


async def test_client_that_reads_no_answer_is_dropped() -> None:
    loop = asyncio.get_running_loop()
    async with served(gateway_flags={"write_timeout_s": 0.3}) as one:
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.setblocking(False)
            await loop.sock_connect(lazy, ("127.0.0.1", one.port))
            # Far more than the buffers of the connection hold.
            await loop.sock_sendall(lazy, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 17)

            async def dropped() -> bool:
                try:
                    await loop.sock_sendall(lazy, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                except ConnectionError:
                    return True
                return False

            await until(dropped)


# Whose fault it is --------------------------------------------------------------------------------


async def test_key_of_the_gateway_that_was_revoked_is_no_fault_of_its_clients(tmp_path: Path) -> None:
    own = tmp_path / "own.key"
    own.write_text(new_key())
    worker = await start_worker()
    try:
        path = key_file(tmp_path / "keys.toml", "user", "gateway", "boss")
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with gateway(f"127.0.0.1:{stack.port}", api_key_file=own) as (http, _):
                for stream in (False, True):
                    body = {"prompt": "x", "stream": stream}
                    mine = {"authorization": f"Bearer {KEYS['user']}"}
                    answer = await http.post("/v1/completions", json=body, headers=mine)
                    assert answer.status_code == 503, answer.text
                    assert answer.json()["error"]["code"] == "forwarding_key_refused"
                    assert "not that of the request" in answer.json()["error"]["message"]
                    assert answer.headers["x-should-retry"] == "true"
                    answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 401
                health = await http.get("/health")
                assert health.status_code == 503
                assert "the gateway's own key was refused" in health.json()["reason"]
                operator = {"authorization": f"Bearer {KEYS['boss']}"}
                metrics = (await http.get("/metrics", headers=operator)).text
                assert "octavo_gateway_own_key_refusals_total 3.0" in metrics
    finally:
        await worker.stop()
