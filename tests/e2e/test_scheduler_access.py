"""API keys over real ports: who gets in, as whom, and that no key ever shows."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import octavo
import psutil
import pytest
import structlog
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.keys import QUOTAS, hash_of, new_key
from octavo.service.private import write_private
from octavo.v1 import common_pb2, generation_pb2_grpc, operations_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import operations_pb2 as ops

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.process import SchedulerProcess
from tests.e2e.scheduler_stack import WAIT_S, Stack, Worker, error_of, scheduler, start_worker, until
from tests.e2e.test_scheduler_process import scheduler_process

ROLES = {"user": ["user"], "boss": ["operator"], "gateway": ["forward"], "other": ["user"]}
# One for each quota, where those are tested.
ROLES |= {quota: ["user"] for quota in QUOTAS}
KEYS = {name: new_key() for name in ROLES}


def key_file(path: Path, *names: str, tenants: str = "") -> Path:
    """Write a key file with these keys, each of a tenant of its own."""
    text = tenants
    for name in names:
        text += f"[tenants.{name}]\n" if f"[tenants.{name}]" not in tenants else ""
    for name in names:
        text += f'[[keys]]\nid = "{name}"\nhash = "{hash_of(KEYS[name])}"\ntenant = "{name}"\n'
        text += f"roles = {ROLES[name]}\n"
    # In one go: a scheduler may be reading it.
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    return fresh.replace(path)


def bearer(name: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),) if name else ()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Stack, Worker]]:
    worker = await start_worker()
    try:
        path = key_file(tmp_path / "keys.toml", *ROLES)
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            yield stack, worker
    finally:
        await worker.stop()


def methods() -> list[Any]:
    """Every method of both services."""
    found = []
    for module, stub in (
        (pb, generation_pb2_grpc.GenerationStub),
        (ops, operations_pb2_grpc.OperationsStub),
    ):
        for service in module.DESCRIPTOR.services_by_name.values():
            found += [pytest.param(stub, method, id=method.name) for method in service.methods]
    return found


async def outcome_of(
    channel: grpc.aio.Channel, stub: Any, method: Any, metadata: Any
) -> grpc.aio.AioRpcError | None:
    """Make a call with an empty message and return the error it ended with."""
    kind = method.input_type
    message = getattr(pb, kind.name, None) or getattr(ops, kind.name)
    function = getattr(stub(channel), method.name)
    try:
        if method.client_streaming:
            call = function(metadata=metadata, timeout=WAIT_S)
            await call.done_writing()
            async for _ in call:
                pass
        elif method.server_streaming:
            call = function(message(), metadata=metadata, timeout=WAIT_S)
            await call.read()
            call.cancel()
        else:
            await function(message(), metadata=metadata, timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_every_method_wants_a_key_and_operators_methods_an_operators(
    pair: tuple[Stack, Worker],
) -> None:
    stack, _ = pair
    for parameters in methods():
        stub, method = parameters.values
        for metadata, reason in (
            ((), "NO_API_KEY"),
            ((("authorization", f"Bearer {new_key()}"),), "BAD_API_KEY"),
            ((("authorization", f"Basic {KEYS['boss']}"),), "BAD_API_KEY"),
            ((*bearer("user"), *bearer("boss")), "BAD_API_KEY"),
        ):
            failure = await outcome_of(stack.channel, stub, method, metadata)
            assert failure is not None
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
            assert error_of(failure).reason == reason
        if stub is operations_pb2_grpc.OperationsStub:
            failure = await outcome_of(stack.channel, stub, method, bearer("user"))
            assert failure is not None
            assert failure.code() is grpc.StatusCode.PERMISSION_DENIED, method.name
            error = error_of(failure)
            assert error.reason == "ROLE_REQUIRED"
            role = "metrics" if method.name in ("GetStatus", "WatchStatus") else "operator"
            assert dict(error.metadata) == {"key": "user", "role": role}
    assert not stack.process.stopping
    assert stack.process.accounts.arrivals == 0


def own_address() -> str:
    """An address of this machine at which it is not on loopback."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has a loopback address only")


async def test_without_keys_others_may_send_requests_and_only_this_machine_may_operate() -> None:
    worker = await start_worker()
    reading = {"GetStatus", "WatchStatus", "GetUsage"}
    operations = [one.values[1] for one in methods() if one.values[0] is operations_pb2_grpc.OperationsStub]
    # What ends the scheduler comes last.
    operations.sort(key=lambda method: method.name == "Drain")
    try:
        async with scheduler(worker.address, listen="0.0.0.0:0", insecure=True) as stack:
            await stack.wait_ready()
            address = f"{own_address()}:{stack.port}"
            async with octavo.AsyncClient(address) as client:
                assert (await client.generate("hello", max_tokens=2)).usage.completion_tokens == 2
                with pytest.raises(octavo.AccessDeniedError, match="--key-file"):
                    await client.drain()
            for method in operations:
                async with grpc.aio.insecure_channel(address) as channel:
                    failure = await outcome_of(channel, operations_pb2_grpc.OperationsStub, method, ())
                if method.name in reading:
                    assert failure is None
                else:
                    assert failure is not None
                    assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
                    assert error_of(failure).reason == "LOOPBACK_REQUIRED", method.name
            assert not stack.process.stopping
            for method in operations:
                failure = await outcome_of(stack.channel, operations_pb2_grpc.OperationsStub, method, ())
                assert failure is None or error_of(failure).reason != "LOOPBACK_REQUIRED"
            assert stack.process.stopping
    finally:
        await worker.stop()


@pytest.mark.parametrize(
    ("listen", "keys", "warned"),
    [
        ("0.0.0.0:0", False, True),
        ("[::]:0", False, True),
        ("127.0.0.1:0", False, False),
        ("localhost:0", False, False),
        ("0.0.0.0:0", True, False),
    ],
)
async def test_scheduler_that_everybody_can_reach_without_a_key_says_so(
    listen: str, keys: bool, warned: bool, tmp_path: Path
) -> None:
    flags = {"key_file": key_file(tmp_path / "keys.toml", "boss")} if keys else {}
    with structlog.testing.capture_logs() as logs:
        SchedulerProcess(SchedulerSettings.load({"listen": listen, "insecure": True, **flags}))
    assert ("scheduler_open_to_all" in [line["event"] for line in logs]) is warned


async def test_probes_need_no_key_and_channelz_needs_an_operators(pair: tuple[Stack, Worker]) -> None:
    stack, _ = pair
    health: Any = health_pb2_grpc.HealthStub(stack.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
    channelz: Any = channelz_pb2_grpc.ChannelzStub(stack.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channelz.GetServers(channelz_pb2.GetServersRequest())
    assert error_of(caught.value).reason == "NO_API_KEY"
    assert await channelz.GetServers(channelz_pb2.GetServersRequest(), metadata=bearer("boss"))


async def test_request_runs_as_the_tenant_of_its_own_key_or_of_its_call(pair: tuple[Stack, Worker]) -> None:
    stack, _ = pair
    endpoint = f"127.0.0.1:{stack.port}"
    with structlog.testing.capture_logs() as logs:
        async with octavo.AsyncClient(endpoint, api_key=KEYS["user"]) as client:
            assert (await client.generate("mine", request_id="a")).text == "mine"
            theirs = await client.generate("mine", request_id="b", api_key=KEYS["other"])
            assert theirs.usage.prompt_tokens == 4
            with pytest.raises(octavo.AccessDeniedError) as caught:
                await client.generate("mine", request_id="c", api_key=new_key())
            assert caught.value.reason == "BAD_API_KEY"
            with pytest.raises(octavo.AccessDeniedError):
                await client.generate("mine", request_id="d", api_key="")
            assert (await client.tokenize("abc")).token_ids
            with pytest.raises(octavo.AccessDeniedError) as caught:
                await client.status()
            assert caught.value.reason == "ROLE_REQUIRED"
    tenants = {
        line["request_id"]: (line["tenant"], line["outcome"]) for line in logs if line["event"] == "request"
    }
    assert tenants == {
        "a": ("user", "STOP"),
        "b": ("other", "STOP"),
        "c": ("", "BAD_API_KEY"),
        "d": ("", "BAD_API_KEY"),
    }


async def test_key_that_only_forwards_runs_nothing_of_its_own(pair: tuple[Stack, Worker]) -> None:
    stack, _ = pair
    async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["gateway"]) as client:
        many = await asyncio.gather(
            client.generate("one", api_key=KEYS["user"]),
            client.generate("two", api_key=KEYS["other"]),
            client.generate("three"),
            client.generate("four", api_key=KEYS["boss"]),
            return_exceptions=True,
        )
    assert [result.text for result in many[:2] if isinstance(result, octavo.GenerateResult)] == ["one", "two"]
    assert [getattr(error, "reason", None) for error in many[2:]] == ["ROLE_REQUIRED", "ROLE_REQUIRED"]


async def test_tenants_share_no_cached_prefix(pair: tuple[Stack, Worker]) -> None:
    stack, _ = pair
    prompt = "a long prompt that fills more than one block of sixteen tokens"
    async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["gateway"]) as client:
        cached = [
            (await client.generate(prompt, api_key=KEYS[name])).usage.cached_tokens
            for name in ("user", "other", "user", "other")
        ]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


async def test_pin_holds_the_prefix_of_the_tenant_that_it_names(pair: tuple[Stack, Worker]) -> None:
    stack, worker = pair
    prompt = "a long prompt that fills more than one block of sixteen tokens"
    async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["user"]) as client:
        await client.generate(prompt)
    pin = ops.PinPrefixRequest(name="p", text=prompt, tenant="user")
    await stack.operations.PinPrefix(pin, metadata=bearer("boss"))
    await until(lambda: _pinned(worker))
    pin.tenant = "nobody"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.operations.PinPrefix(pin, metadata=bearer("boss"))
    assert error_of(caught.value).violations[0].field == "tenant"


async def _pinned(worker: Worker) -> bool:
    return bool((await worker.pool()).pinned)


@pytest.mark.parametrize(("secret", "warned"), [("", True), ("5e12", False)])
async def test_key_file_without_a_cache_secret_is_warned_about_at_start(
    secret: str, warned: bool, tmp_path: Path
) -> None:
    path = key_file(tmp_path / "keys.toml", "user")
    with structlog.testing.capture_logs() as logs:
        async with scheduler("127.0.0.1:1", key_file=path, cache_secret=secret):
            pass
    found = [entry["log_level"] for entry in logs if entry["event"] == "cache_secret_missing"]
    assert found == ["warning"] * warned


async def test_key_taken_out_of_the_file_works_no_more_on_streams_that_are_open(tmp_path: Path) -> None:
    worker = await start_worker()
    path = key_file(tmp_path / "keys.toml", *ROLES)
    try:
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with (
                octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["user"]) as client,
                octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["boss"]) as boss,
            ):
                await client.generate("before")
                watched = boss.watch_status(0.1)
                await anext(watched)
                worker.gate.close()
                running = client.stream("runs on")
                await running.wait_accepted()
                path.write_text("[tenants")
                await until(lambda: stack.process.metrics.key_file_broken._value.get() == 1)
                status = await boss.status()
                assert "not TOML" in (status.key_file_problem or "")
                key_file(path, "other")
                await until(lambda: stack.process.access.tenant_named("user") is None)
                with pytest.raises(octavo.AccessDeniedError):
                    await client.generate("after")
                with pytest.raises(octavo.AccessDeniedError):
                    async for _ in watched:
                        pass
                worker.gate.open()
                assert "".join([delta.text async for delta in running]) == "runs on"
    finally:
        await worker.stop()


async def test_without_a_key_file_keys_are_not_looked_at() -> None:
    worker = await start_worker()
    try:
        async with scheduler(worker.address) as stack:
            await stack.wait_ready()
            async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key="whatever") as client:
                assert (await client.generate("open", api_key="x")).text == "open"
                assert (await client.status()).arrivals == 1
    finally:
        await worker.stop()


async def test_no_key_is_in_logs_plan_log_or_errors(tmp_path: Path) -> None:
    """Whatever a client does wrong with it. The process logs all that it has to say."""
    worker = await start_worker()
    path = key_file(tmp_path / "keys.toml", *ROLES)
    plan_log = tmp_path / "plans"
    flags = (f"--key-file={path}", f"--plan-log={plan_log}", "--log-level=debug")
    said: list[str] = []
    try:
        async with scheduler_process(f"--workers={worker.address}", *flags) as process:
            listening = await process.event("scheduler_listening")
            await process.event("worker_up")
            endpoint = f"127.0.0.1:{listening['port']}"
            async with octavo.AsyncClient(endpoint, api_key=KEYS["gateway"]) as client:
                await client.generate("x", api_key=KEYS["user"])
                for api_key in (KEYS["user"] + "x", KEYS["user"] * 5000, KEYS["boss"]):
                    with pytest.raises(octavo.AccessDeniedError) as caught:
                        await client.generate("x", api_key=api_key)
                    said.append(f"{caught.value!r} {vars(caught.value)}")
            async with grpc.aio.insecure_channel(endpoint) as channel:
                raw: Any = channel.unary_stream("/octavo.v1.Generation/Generate")
                message = pb.GenerateRequest(text="x", api_key=KEYS["user"]).SerializeToString()
                for broken in (message.replace(b"octavo_", b"octavo\xff"), message[:-3]):
                    with pytest.raises(grpc.aio.AioRpcError) as failed:
                        await raw(broken, metadata=bearer("user")).read()
                    said.append(f"{failed.value.details()} {failed.value.trailing_metadata()}")
            process.send(signal.SIGTERM)
            assert await process.wait() == 0
            said.append(json.dumps(process.lines))
    finally:
        await worker.stop()
    said.append(plan_log.read_bytes().decode(errors="replace"))
    assert "access" not in said[-1]
    assert "INVALID_REQUEST" in said[-2]
    for name, key in KEYS.items():
        secret = key.removeprefix("octavo_")[:20]
        assert not any(secret in text or hash_of(key)[7:] in text for text in said), name


async def test_scheduler_with_a_broken_key_file_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write_private(path, "[tenants.a]\nweight = -1\n")
    async with scheduler_process(f"--key-file={path}") as process:
        assert await process.wait() == 2
        (line,) = process.lines
        assert line["reason"] == "KEY_FILE"
        assert "tenants.a.weight" in line["problem"]


async def test_what_an_operator_does_is_logged_with_the_key_and_without_prompts(
    pair: tuple[Stack, Worker],
) -> None:
    stack, _ = pair
    with structlog.testing.capture_logs() as logs:
        async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["boss"]) as client:
            await client.pin_prefix("greeting", "a secret prompt " * 20)
            with pytest.raises(octavo.OctavoError):
                await client.drain("nobody")
    told = [line for line in logs if line["event"] == "operator_action"]
    assert [(line["action"], line["key"], line["outcome"]) for line in told] == [
        ("pin_prefix", "boss", "OK"),
        ("drain", "boss", "UNKNOWN_WORKER"),
    ]
    assert told[0]["name"] == "greeting"
    assert told[1]["worker_id"] == "nobody"
    assert "secret prompt" not in str(told)


async def session(stack: Stack, name: str, *messages: pb.SessionRequest) -> Any:
    """Open a session with a key, and send messages on it."""
    call: Any = generation_pb2_grpc.GenerationStub(stack.channel).Session(metadata=bearer(name))  # type: ignore[call-arg] # written to instead
    for message in messages:
        await call.write(message)
    return call


async def answer_on(call: Any) -> list[pb.GenerateEvent]:
    """Read until a request has ended; return all events."""
    events: list[pb.GenerateEvent] = []
    async with asyncio.timeout(WAIT_S):
        while not any(event.WhichOneof("event") in ("finished", "error") for event in events):
            events += (await call.read()).events
    return events


async def test_tenant_cannot_name_or_cancel_a_request_of_another(pair: tuple[Stack, Worker]) -> None:
    stack, worker = pair
    mine = pb.SessionRequest(generate=pb.GenerateRequest(request_id="same", text="of one"))
    theirs = pb.SessionRequest(generate=pb.GenerateRequest(request_id="same", text="of the other"))
    worker.gate.close()
    one = await session(stack, "user", mine)
    await until(lambda: stack.process.accounts.live == 1)
    other = await session(
        stack, "other", pb.SessionRequest(cancel=pb.CancelRequest(request_id="same")), theirs
    )
    await until(lambda: stack.process.accounts.live == 2)
    worker.gate.open()
    for call, text in ((one, "of one"), (other, "of the other")):
        events = await answer_on(call)
        assert "".join(event.delta.text for event in events if event.HasField("delta")) == text
        assert events[-1].finished.reason == common_pb2.FINISH_REASON_STOP
        call.cancel()


async def test_what_a_tenant_is_told_names_no_other(tmp_path: Path) -> None:
    worker = await start_worker()
    path = key_file(
        tmp_path / "keys.toml", "user", "other", tenants="[tenants.user]\nrequests_per_minute = 1\n"
    )
    try:
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            async with octavo.AsyncClient(f"127.0.0.1:{stack.port}", api_key=KEYS["user"]) as client:
                models = await client.models()
                await client.generate("one")
                with pytest.raises(octavo.OverloadedError) as caught:
                    await client.generate("two")
                for method in (client.status, client.audit, client.drain):
                    with pytest.raises(octavo.AccessDeniedError):
                        await method()
        assert "other" not in f"{models} {caught.value} {caught.value.metadata}"
    finally:
        await worker.stop()
