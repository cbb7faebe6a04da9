"""Clients that leave or do not read, services that are full, late, locked or gone, through a gateway."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo import AsyncClient
from octavo.stack import Child, free_port
from octavo.stack import Stack as ProcessStack

from scheduler_svc.fleet import worker_link
from tests.e2e.gateway_stack import Served, gateway, served
from tests.e2e.scheduler_stack import scheduler, start_worker, until
from tests.e2e.test_scheduler_access import KEYS, key_file

LONG = {"prompt": "a prompt", "max_tokens": 900, "ignore_eos": True}


async def live_requests(one: Served) -> int:
    return int((await one.stack.status()).live_requests)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_its_blocks_at_the_next_step(stream: bool) -> None:
    async with served() as one:
        one.worker.gate.close()
        asking = asyncio.create_task(one.post("/v1/completions", **LONG, stream=stream))
        one.worker.gate.let_go(3)
        await until(lambda: _running(one))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: _no_live(one))
        one.worker.gate.let_go(2)  # The step that was under way, and the one planned behind it.

        await until(one.worker.is_empty)
        assert await one.metric("octavo_gateway_requests_total", endpoint="completions", status="499") == 1
        one.worker.gate.open()


async def _no_live(one: Served) -> bool:
    return await live_requests(one) == 0


async def test_client_that_does_not_read_is_cut_off_and_others_go_on() -> None:
    async with served(gateway_flags={"write_timeout_s": 0.3}) as one:
        stats = {"continuous_usage_stats": True}
        # More than the buffers of the connection hold.
        prompts = [LONG["prompt"]] * 4
        body = json.dumps({**LONG, "prompt": prompts, "n": 16, "stream": True, "stream_options": stats})
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", one.port))
        head = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json")
        lazy.sendall("\r\n".join((*head, f"content-length: {len(body)}", "", body)).encode())
        try:
            other = await one.complete(prompt="somebody else", max_tokens=100)
            assert other["choices"][0]["text"] == "somebody else"

            async def cut() -> bool:
                return await one.metric("octavo_gateway_slow_clients_total") == 1

            await until(cut)
            await until(one.worker.is_empty)
        finally:
            lazy.close()


async def test_queue_full_is_429_with_the_schedulers_delay() -> None:
    async with served({"max_num_seqs": 1}, max_waiting_requests=1) as one:
        one.worker.gate.close()
        asks = [one.post("/v1/completions", prompt=f"p{n}", max_tokens=1) for n in range(6)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await until(lambda: sum(task.done() for task in tasks) >= 4)
        one.worker.gate.open()
        answers = await asyncio.gather(*tasks)

        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) >= 4
        for answer in refused:
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) * 1000 >= int(answer.headers["retry-after-ms"]) > 0
            assert answer.headers["x-should-retry"] == "true"
            assert answer.headers["x-octavo-level"] == "0"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"x-octavo-queue-timeout-ms": "0"}, "queue_timeout"),
        ({"x-octavo-ttft-deadline-ms": "50"}, "deadline_queued"),
        ({"x-octavo-deadline-ms": "50"}, "deadline_queued"),
    ],
)
async def test_time_that_ran_out_before_the_first_token_is_408(header: dict[str, str], code: str) -> None:
    async with served({"max_num_seqs": 1}) as one:
        one.worker.gate.close()
        first = asyncio.create_task(one.post("/v1/completions", prompt="first", max_tokens=1))
        await until(lambda: _running(one))
        answer = await one.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}, headers=header
        )
        one.worker.gate.open()
        await first

        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == code
        assert answer.headers["x-should-retry"] == "false"


async def _running(one: Served) -> bool:
    return any(worker.running for worker in (await one.stack.status()).workers)


async def test_deadline_that_passes_in_a_stream_is_its_last_event() -> None:
    async with served() as one:
        one.worker.gate.close()
        asking = asyncio.create_task(
            one.http.post(
                "/v1/completions", json={**LONG, "stream": True}, headers={"x-octavo-deadline-ms": "20000"}
            )
        )
        one.worker.gate.let_go(3)
        await until(lambda: one.stack.process.accounts.recent_output_tokens.per_s(0) > 0)
        one.stack.let_time_pass(20.0)
        answer = await asking
        one.worker.gate.open()

        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "deadline_running"
        assert last["error"]["type"] == "timeout_error"


async def test_body_too_large_is_413_however_it_is_announced() -> None:
    async with served(gateway_flags={"max_body_bytes": 2048}) as one:

        async def pieces() -> Any:
            for _ in range(100):
                yield b"x" * 100

        for content in (b"x" * 10_000, pieces()):
            answer = await one.http.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        assert (await one.complete(prompt="abc"))["choices"][0]["text"] == "abc"


async def test_nothing_that_can_serve_is_503_and_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_DESCRIBE_TIMEOUT_S", 0.1)
    async with scheduler("127.0.0.1:1") as stack, gateway(f"127.0.0.1:{stack.port}") as (http, _):
        answer = await http.post("/v1/completions", json={"model": "echo", "prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await http.get("/health")).status_code == 503
    async with gateway("127.0.0.1:1", connect_timeout_s=0.1) as (http, _):
        answer = await http.post("/v1/completions", json={"model": "echo", "prompt": "x"})
        assert answer.status_code == 503
        assert (await http.get("/health")).status_code == 503


async def test_keys_of_clients_are_passed_on_and_the_gateways_own_is_never_lent(tmp_path: Path) -> None:
    own = tmp_path / "own.key"
    own.write_text(KEYS["gateway"])
    worker = await start_worker()
    try:
        path = key_file(tmp_path / "keys.toml", "user", "gateway")
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with gateway(f"127.0.0.1:{stack.port}", api_key_file=own) as (http, _):
                body = {"model": "echo", "prompt": "abc"}
                asks: list[tuple[str, str, Any]] = [
                    ("POST", "/v1/completions", body),
                    ("POST", "/tokenize", {"prompt": "abc"}),
                    ("POST", "/detokenize", {"tokens": [100]}),
                    ("GET", "/v1/models", None),
                ]
                for method, url, content in asks:
                    for key, status in ((KEYS["user"], 200), ("wrong", 401), (None, 401)):
                        headers = {"authorization": f"Bearer {key}"} if key else {}
                        answer = await http.request(method, url, json=content, headers=headers)
                        assert answer.status_code == status, (url, key, answer.text)
                        if status == 401:
                            assert answer.json()["error"]["type"] == "authentication_error"
                assert (await http.get("/health")).status_code == 200
    finally:
        await worker.stop()


async def test_responses_go_on_when_the_scheduler_is_killed_and_restarted(
    own_stack: ProcessStack,
) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"model": "sim", "prompt": f"prompt {number}", "max_tokens": 60, "seed": number}

    async with gateway(own_stack.endpoint) as (http, _):

        async def streamed(number: int) -> str:
            text = ""
            asked = {**body(number), "stream": True}
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        seen.add(number)
            return text

        async def whole(number: int) -> str:
            answer = await http.post("/v1/completions", json=body(number))
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        seen: set[int] = set()
        expected = await asyncio.gather(*(whole(number) for number in range(8)))
        streams = [asyncio.create_task(streamed(number)) for number in range(8)]
        wholes = [asyncio.create_task(whole(number)) for number in range(8)]
        await until(lambda: len(seen) == 8)
        own_stack.scheduler.kill()
        own_stack.scheduler.start()

        assert await asyncio.gather(*streams) == expected
        assert await asyncio.gather(*wholes) == expected


async def test_two_replicas_answer_alike() -> None:
    async with served() as one, gateway(f"127.0.0.1:{one.stack.port}") as (other, _):
        body = {"prompt": "abc", "max_tokens": 3, "seed": 1}
        answers = [await http.post("/v1/completions", json=body) for http in (one.http, other)]
        assert answers[0].json()["choices"] == answers[1].json()["choices"]


async def test_gateway_told_to_stop_finishes_what_runs(own_stack: ProcessStack, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    child = Child(
        "gateway",
        address,
        ["gateway", "--listen", address, "--endpoint", own_stack.endpoint],
        tmp_path / "gateway.log",
        {},
    )
    child.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
            await until(lambda: _is_up(http))
            body = {"model": "sim", "prompt": "x", "max_tokens": 50, "stream": True, "ignore_eos": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: {")
                child.signal(signal.SIGTERM)
                rest = [line async for line in lines]
            assert "data: [DONE]" in rest
        assert await asyncio.to_thread(child.process.wait, 30) == 0
    finally:
        child.kill()
    async with AsyncClient(own_stack.endpoint) as client:
        assert (await client.status()).live_requests == 0


async def _is_up(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def test_what_load_took_from_a_request_is_in_headers_and_usage() -> None:
    flags = {
        "overload_control": True,
        "max_waiting_requests": 10,
        "level_backlog": "0.3,none,none,none",
        "level_wait": "none,none,none,none",
        "trim_prompt_tokens": "64,8",
        "trim_max_tokens": "16,4",
    }
    async with served({"max_num_seqs": 1, "max_model_len": 256}, **flags) as one:
        one.worker.gate.close()
        load = [asyncio.create_task(one.complete(prompt=f"p{n}", max_tokens=2)) for n in range(5)]

        async def at_level_one() -> bool:
            return (await one.stack.status()).level == 1

        await until(at_level_one)
        headers = {"x-octavo-degrade": "may_trim", "x-octavo-keep-head-tokens": "10"}
        body = {"prompt": "x" * 200, "max_tokens": 40, "ignore_eos": True}
        asks = [
            asyncio.create_task(
                one.http.post("/v1/completions", json={**body, "stream": stream, **more}, headers=headers)
            )
            for stream, more in ((False, {}), (True, {"stream_options": {"include_usage": True}}))
        ]
        await until(lambda: _arrived(one, 7))
        one.worker.gate.open()
        whole, streamed = await asyncio.gather(*asks)
        await asyncio.gather(*load)

        last = streamed.text.split("\n\n")[-3].removeprefix("data: ")
        usages = [whole.json()["usage"], json.loads(last)["usage"]]
        for answer, usage in zip((whole, streamed), usages, strict=True):
            trimmed = usage["prompt_tokens_details"]["trimmed_tokens"]
            assert 200 - usage["prompt_tokens"] == trimmed > 0
            assert answer.headers["x-octavo-trimmed-tokens"] == str(trimmed)
            clamped = usage["completion_tokens_details"]["clamped_max_tokens"]
            assert answer.headers["x-octavo-max-tokens"] == str(clamped)
            assert answer.headers["x-octavo-level"] == "1"
            assert usage["completion_tokens"] == clamped <= 16


async def _arrived(one: Served, count: int) -> bool:
    return (await one.stack.status()).arrivals >= count
