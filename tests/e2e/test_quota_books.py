"""Quotas charge what workers and tokenizers have computed, however a request came and went."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.driver import CoreDriver
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.requests.tenants import TenantState
from tests.e2e.scheduler_stack import WAIT_S, Output, Stack, Worker, error_of, scheduler, start_worker, until
from tests.e2e.test_scheduler_access import bearer, key_file


class Computed:
    """What workers say that they have computed."""

    def __init__(self, driver: CoreDriver) -> None:
        self.prompt_tokens = self.output_tokens = 0
        self._report = driver.report
        driver.report = self.take  # type: ignore[method-assign]  # a spy

    def take(self, worker_id: str, report: Any) -> None:
        self.prompt_tokens += report.timing.num_prefill_tokens
        self.output_tokens += len(report.token_ids)
        self._report(worker_id, report)

    def is_charged_to(self, tenant: TenantState) -> bool:
        return (tenant.prompt_tokens, tenant.output_tokens) == (self.prompt_tokens, self.output_tokens)


@asynccontextmanager
async def service(
    path: Path, quotas: str, worker_flags: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Stack, Worker, Computed]]:
    """A scheduler with the tenants `user`, whose quotas these are, and `other`; and a worker."""
    worker = await start_worker(**(worker_flags or {}))
    try:
        key_file(path, "user", "other", "boss", tenants=f"[tenants.user]\n{quotas}\n")
        async with scheduler(worker.address, key_file=path) as stack:
            await stack.wait_ready()
            yield stack, worker, Computed(stack.process.driver)
    finally:
        await worker.stop()


def tenant(stack: Stack) -> TenantState:
    process = stack.process
    user = process.access.tenant_named("user")
    assert user is not None
    return process.accounts.tenants.state(user, process.accounts.clock())


async def until_refused(ask: Callable[[int], Awaitable[object]]) -> tuple[int, common_pb2.Error]:
    """Ask until it is refused; return how often it was not, and the error."""
    for number in itertools.count():
        try:
            await ask(number)
        except grpc.aio.AioRpcError as failure:
            return number, error_of(failure)
    raise AssertionError


async def generate(stack: Stack, name: str = "user", **fields: Any) -> Output:
    output = Output()
    call: Any = stack.generation.Generate
    async for event in call(pb.GenerateRequest(**fields), metadata=bearer(name), timeout=WAIT_S):
        output.take(event)
    return output


async def test_resumed_tokens_are_charged_like_a_prompt(tmp_path: Path) -> None:
    async with service(tmp_path / "keys.toml", "tokens_per_minute = 3000") as (stack, worker, computed):

        async def resume(number: int) -> None:
            resumed = {"token_ids": [3 + (number + place) % 200 for place in range(500)]}
            sampling = {"max_tokens": 501, "ignore_eos": True}
            text = f"{number:016}"
            await generate(stack, text=text, skip_text=True, resume=[resumed], sampling=sampling)

        taken, error = await until_refused(resume)
        assert error.metadata["quota"] == "tokens_per_minute"
        # Each takes 516 tokens to compute and 1 new one; what comes back meanwhile is for one or two more.
        assert 5 <= taken <= 12
        await until(worker.is_empty)
        assert computed.prompt_tokens == 516 * taken
        assert computed.is_charged_to(tenant(stack))
        assert tenant(stack).output_tokens == taken


async def test_prompt_is_charged_though_its_request_is_cancelled_before_a_token(tmp_path: Path) -> None:
    flags = {"max_num_batched_tokens": 64}
    quotas = "tokens_per_minute = 100000"
    async with service(tmp_path / "keys.toml", quotas, flags) as (stack, worker, computed):
        for number in range(5):
            worker.gate.close()
            running = asyncio.create_task(generate(stack, text=f"{number}" * 900))
            await until(lambda: stack.process.driver.snapshot().live_requests == 1)
            worker.gate.let_go(4)
            await until(lambda n=number: computed.prompt_tokens >= 128 * (n + 1))  # type: ignore[misc]
            running.cancel()
            await until(lambda: stack.process.accounts.live == 0)
            worker.gate.open()
            await until(worker.is_empty)
        assert 5 * 128 <= computed.prompt_tokens < 5 * 900
        await until(lambda: computed.is_charged_to(tenant(stack)))


async def test_choices_are_charged_and_count_each(tmp_path: Path) -> None:
    async with service(tmp_path / "keys.toml", "requests_in_flight = 4") as (stack, worker, computed):
        await generate(stack, text="forty characters of a prompt, in letters", sampling={"n": 4})
        await until(worker.is_empty)
        assert computed.prompt_tokens < 4 * 40
        assert computed.is_charged_to(tenant(stack))
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stack, text="x", sampling={"n": 5})
            assert error_of(caught.value).violations[0].field == "sampling.n"
        worker.gate.close()
        running = asyncio.create_task(generate(stack, text="fits", sampling={"n": 3}))
        await until(lambda: stack.process.driver.snapshot().live_requests == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stack, text="x", sampling={"n": 2})
        assert error_of(caught.value).metadata["quota"] == "requests_in_flight"
        other = asyncio.create_task(generate(stack, "other", text="nobody else is refused"))
        worker.gate.open()
        await asyncio.gather(running, other)


async def test_many_paced_sessions_wait_no_more_than_their_tenant_may(tmp_path: Path) -> None:
    sessions, each = 40, 5
    async with service(tmp_path / "keys.toml", "waiting_requests = 4") as (stack, worker, _):
        most = 0
        ended: list[common_pb2.Error | pb.Finished] = []

        async def drive(number: int) -> None:
            nonlocal most
            call: Any = stack.generation.Session(metadata=bearer("user"))  # type: ignore[call-arg]
            await call.write(pb.SessionRequest(open=pb.OpenSession(paced=True)))
            sent = done = 0
            while done < each:
                message = await call.read()
                for _ in range(min(message.credits, each - sent)):
                    await call.write(
                        pb.SessionRequest(
                            generate=pb.GenerateRequest(request_id=str(sent), text=f"{number} {sent}")
                        )
                    )
                    sent += 1
                most = max(most, tenant(stack).waiting_requests)
                for event in message.events:
                    if event.WhichOneof("event") in {"error", "finished"}:
                        ended.append(event.error if event.HasField("error") else event.finished)
                        done += 1
            call.cancel()

        worker.gate.close()
        driving = [asyncio.create_task(drive(number)) for number in range(sessions)]
        await until(lambda: tenant(stack).waiting_requests == 4)
        await until(lambda: stack.process.driver.snapshot().live_requests == 4)
        worker.gate.open()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*driving)
        assert 0 < most <= 4
        assert len(ended) == sessions * each
        assert all(isinstance(one, pb.Finished) for one in ended), "no credit was worth nothing"


async def test_paced_session_is_of_the_batch_class_unless_it_says_otherwise(tmp_path: Path) -> None:
    async with service(tmp_path / "keys.toml", "") as (stack, worker, _):
        worker.gate.close()
        call: Any = stack.generation.Session(metadata=bearer("user"))  # type: ignore[call-arg]
        await call.write(pb.SessionRequest(open=pb.OpenSession(paced=True)))
        await call.write(pb.SessionRequest(generate=pb.GenerateRequest(request_id="a", text="a")))
        hurried = pb.GenerateRequest(request_id="b", text="b", terms={"priority": 1})
        await call.write(pb.SessionRequest(generate=hurried))
        await until(lambda: stack.process.driver.snapshot().live_requests == 2)
        specs = {
            request.spec.priority.name: request.spec.paced
            for request in stack.process.driver._core._lifecycle.requests.values()
        }
        assert specs == {"BATCH": True, "INTERACTIVE": False}, "only the batch class is beyond the bounds"
        call.cancel()
        worker.gate.open()


async def test_tokenizing_of_one_tenant_delays_no_other_and_is_charged_by_the_byte(tmp_path: Path) -> None:
    quotas = "tokenizer_bytes_per_minute = 10_000_000"
    async with service(tmp_path / "keys.toml", quotas) as (stack, worker, _):
        text = "the octavo is a format of book " * 1500
        size = pb.TokenizeRequest(text=text).ByteSize()
        call: Any = stack.generation.Tokenize
        flood = [asyncio.create_task(_tokenize(call, text)) for _ in range(150)]
        await until(lambda: any(task.done() for task in flood))
        before = sum(task.done() for task in flood)
        await generate(stack, "other", text="a short prompt", sampling={"max_tokens": 1})
        assert sum(task.done() for task in flood) - before < 75, "it waited for a few of them, not for all"
        await asyncio.gather(*flood)
        assert tenant(stack).text_bytes == 150 * size
        _, error = await until_refused(lambda _: _tokenize(call, text))
        assert error.metadata["quota"] == "tokenizer_bytes_per_minute"
        await until(worker.is_empty)


async def test_constraints_are_charged_by_the_byte_like_text(tmp_path: Path) -> None:
    async with service(tmp_path / "keys.toml", "tokenizer_bytes_per_minute = 10_000") as (stack, worker, _):
        # The worker of these tests compiles none, and says so when all else is done.
        stack.process.models.find("").model.constrains = True
        choices = common_pb2.StructuredOutput(choice=common_pb2.ChoiceList(values=["a" * 1000] * 4))
        fields: Any = {"text": "abc", "sampling": {"max_tokens": 1, "structured": choices}}
        with pytest.raises(grpc.aio.AioRpcError, match="follows no grammar"):
            await generate(stack, **fields)
        assert tenant(stack).text_bytes == len("abc") + choices.ByteSize()
        call: Any = stack.generation.Tokenize
        await _tokenize(call, "a" * 5900)
        _, error = await until_refused(lambda _: generate(stack, **fields))
        assert error.metadata["quota"] == "tokenizer_bytes_per_minute"
        await until(worker.is_empty)


async def _tokenize(call: Any, text: str) -> None:
    await call(pb.TokenizeRequest(text=text), metadata=bearer("user"), timeout=WAIT_S)


async def test_time_of_steps_is_split_over_tenants_and_idle_time_is_nobodys(tmp_path: Path) -> None:
    async with service(tmp_path / "keys.toml", "") as (stack, _, _):
        driver, steps_us = stack.process.driver, 0
        report = driver.report

        def spy(worker_id: str, answer: Any) -> None:
            nonlocal steps_us
            steps_us += answer.timing.execute_us + answer.timing.overhead_us + answer.timing.copy_us
            report(worker_id, answer)

        driver.report = spy  # type: ignore[method-assign]
        for name in ("user", "other"):
            await asyncio.gather(*(generate(stack, name, text=f"{name} asks {i}") for i in range(4)))
        key = bearer("boss")
        counted_us = -1
        while counted_us != steps_us:
            # The last step, which lets the blocks go, may be reported after the last answer.
            counted_us = steps_us
            answer = await stack.operations.GetUsage(operations_pb2.GetUsageRequest(), metadata=key)

        (minute,) = answer.minutes
        used = {one.tenant: one.device_s for one in minute.tenants}
        assert used.keys() == {"user", "other"}
        # A step that only lets blocks go is nobody's.
        assert sum(used.values()) + minute.unassigned_device_s == pytest.approx(counted_us / 1e6, rel=1e-6)
        assert minute.idle_device_s > 0
        metrics = SchedulerMetrics()
        metrics.watch(driver.snapshot)
        for name, seconds in used.items():
            shown = metrics.registry.get_sample_value("octavo_tenant_device_seconds_total", {"tenant": name})
            assert shown == seconds
