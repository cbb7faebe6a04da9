"""Messages of a later version, on real ports: gateway, scheduler and worker take them, and go on.

The SDK's side is in tests/unit/client/test_later_versions.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from octavo.protocol.steps import Report
from octavo.v1 import common_pb2, operations_pb2, worker_pb2
from octavo.v1 import generation_pb2 as pb
from structlog.testing import capture_logs

import worker_svc.api.session as worker_session
from tests.e2e import scheduler_stack
from tests.e2e.gateway_stack import gateway
from tests.e2e.scheduler_stack import Output, Stack, Worker, error_of, one_worker, until
from tests.e2e.test_scheduler_session import Client
from tests.e2e.worker_stack import Worker as StepWorker
from tests.e2e.worker_stack import admit, keys_of
from tests.later_version import VALUE, later, with_unknown_member
from tests.unit.client.fake_scheduler import expected_text
from tests.unit.client.later_scheduler import LaterScheduler
from worker_svc.api.convert import describe

Pair = tuple[Stack, Worker]
UNKNOWN_KIND = common_pb2.SamplingParams(
    structured=with_unknown_member(common_pb2.StructuredOutput(), "kind")
)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with one_worker() as pair:
        yield pair


# The gateway, as a reader of what a scheduler says


@pytest.fixture
async def later_scheduler() -> AsyncIterator[LaterScheduler]:
    fake = LaterScheduler()
    await fake.start()
    yield fake
    await fake.stop()


async def test_gateway_names_an_unknown_finish_reason_and_serves_its_neighbours(
    later_scheduler: LaterScheduler,
) -> None:
    async with gateway(later_scheduler.endpoint) as (http, _):
        prompts = ("a neighbour", "later reason", "broken event", "another")
        bodies = [
            {"model": "fake", "prompt": prompt, "seed": seed, "max_tokens": 4}
            for seed, prompt in enumerate(prompts, 1)
        ]
        await later_scheduler.hold()
        asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
        await later_scheduler.until(lambda: len(later_scheduler.requests) == 4)
        await later_scheduler.allow()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
        reasons = [answers[at].json()["choices"][0]["finish_reason"] for at in (0, 1, 3)]
        assert reasons == ["length", "unknown", "length"]
        texts = {answers[at].json()["choices"][0]["text"] for at in (0, 1, 3)}
        assert texts == {expected_text(seed, 4) for seed in (1, 2, 4)}

        streamed = await http.post("/v1/completions", json={**bodies[1], "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "unknown"
    assert later_scheduler.sessions == 1


# The scheduler, as a reader of what clients say


async def test_scheduler_takes_unknown_fields_of_a_request(pair: Pair) -> None:
    stack, _ = pair
    sampling = common_pb2.SamplingParams(max_tokens=5, structured=None)
    message = pb.GenerateRequest(text="hello there", sampling=sampling, terms=pb.ServiceTerms(priority=1))
    output = Output()
    async for event in stack.generation.Generate(later(message)):
        output.take(event)
    assert output.text[0] == "hello"
    status = await stack.operations.GetStatus(later(operations_pb2.GetStatusRequest()))
    assert status.status.outcomes == {"LENGTH": 1}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("terms.priority", pb.GenerateRequest(text="x", terms=pb.ServiceTerms(priority=VALUE))),
        ("input", with_unknown_member(pb.GenerateRequest(), "input")),
        ("sampling.structured.kind", pb.GenerateRequest(text="x", sampling=UNKNOWN_KIND)),
    ],
)
async def test_scheduler_refuses_a_request_that_it_cannot_understand_and_no_other(
    pair: Pair, field: str, message: pb.GenerateRequest
) -> None:
    stack, worker = pair
    client = Client(stack)
    worker.gate.close()
    await client.generate("neighbour", text="hello")
    await until(lambda: stack.process.driver.snapshot().live_requests == 1)
    message.request_id = "later"
    await client.call.write(later(pb.SessionRequest(generate=message)))
    await client.call.write(with_unknown_member(pb.SessionRequest(), "message"))
    await client.read_until_ended("later", "")
    worker.gate.open()
    await client.read_until_ended("neighbour")
    assert client.outputs["neighbour"].text[0] == "hello"
    assert client.errors["later"].reason == "INVALID_REQUEST"
    assert [entry.field for entry in client.errors["later"].violations] == [field]
    assert [entry.field for entry in client.errors[""].violations] == ["message"]

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in stack.generation.Generate(message):
            pass
    assert [entry.field for entry in error_of(failed.value).violations] == [field]


async def test_scheduler_refuses_an_unknown_kind_of_fault_by_its_field() -> None:
    async with one_worker(enable_faults=True) as (stack, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stack.operations.SetFaults(
                operations_pb2.SetFaultsRequest(faults=[operations_pb2.Fault(kind=VALUE)])
            )
        error = error_of(failed.value)
        assert (error.reason, [entry.field for entry in error.violations]) == ("INVALID_REQUEST", ["faults"])


# The scheduler, as a reader of what workers say


class LaterReports:
    """Makes a worker report as a later version would; `change` edits each report before it is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.change: Any = lambda report: None
        self._to_proto = worker_session.report_to_proto
        monkeypatch.setattr(worker_session, "report_to_proto", self._later)

    def _later(self, report: Report) -> worker_pb2.Report:
        message = self._to_proto(report)
        self.change(message)
        return later(message)


@pytest.fixture
def later_reports(monkeypatch: pytest.MonkeyPatch) -> LaterReports:
    return LaterReports(monkeypatch)


def link_problems(stack: Stack) -> list[str]:
    return [link.last_problem for link in stack.process.fleet]


async def test_scheduler_takes_unknown_fields_and_messages_of_a_worker_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, later_reports: LaterReports
) -> None:
    welcomes, on_report = worker_session.welcomes, worker_session.SchedulerSession._on_report

    def after_an_unknown_message(session: worker_session.SchedulerSession, report: Report) -> None:
        session._outbox.put_nowait(with_unknown_member(worker_pb2.WorkerMessage(), "message"))
        on_report(session, report)

    monkeypatch.setattr(scheduler_stack, "describe", lambda *given: later(describe(*given)))
    monkeypatch.setattr(worker_session, "welcomes", lambda *given: map(later, welcomes(*given)))
    monkeypatch.setattr(worker_session.SchedulerSession, "_on_report", after_an_unknown_message)
    async with one_worker() as (stack, _):
        with capture_logs() as logs:
            outputs = await asyncio.gather(*(stack.generate(text=f"request {number}") for number in range(4)))
        assert link_problems(stack) == [""]
    assert [output.text[0] for output in outputs] == [f"request {number}" for number in range(4)]
    assert [entry["event"] for entry in logs if "unknown" in entry["event"]] == ["unknown_message_ignored"]


async def test_scheduler_fails_only_the_sequence_that_ended_for_an_unknown_reason(
    pair: Pair, later_reports: LaterReports
) -> None:
    stack, _ = pair
    changed: list[int] = []

    def change(report: worker_pb2.Report) -> None:
        for entry in report.finished:
            if not changed:
                changed.append(entry.handle)
                entry.reason = VALUE

    later_reports.change = change
    outcomes = await asyncio.gather(
        *(stack.generate(text="said in full") for _ in range(3)), return_exceptions=True
    )
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [outcome.text[0] for outcome in outcomes if isinstance(outcome, Output)] == ["said in full"] * 2
    (failure,) = failures
    error = error_of(failure)
    assert (error.reason, str(VALUE) in error.message) == ("STEP_FAILED", True)
    assert link_problems(stack) == [""]


async def test_scheduler_fails_only_the_request_that_was_refused_for_an_unknown_reason(
    pair: Pair, later_reports: LaterReports
) -> None:
    stack, _ = pair

    def change(report: worker_pb2.Report) -> None:
        for entry in report.refused:
            entry.reason = VALUE

    later_reports.change = change
    # The echo refuses what it should constrain, for a reason that nobody knows now.
    constrained = common_pb2.SamplingParams(structured=common_pb2.StructuredOutput(regex="a"))
    refused, taken = await asyncio.gather(
        stack.generate(text="one", sampling=constrained), stack.generate(text="two"), return_exceptions=True
    )
    assert isinstance(taken, Output)
    assert taken.text[0] == "two"
    assert error_of(refused).reason == "UNSUPPORTED"
    assert link_problems(stack) == [""]


async def test_scheduler_takes_a_step_of_unknown_status_for_one_that_failed(
    later_reports: LaterReports,
) -> None:
    changed: list[int] = []

    def change(report: worker_pb2.Report) -> None:
        if report.status == worker_pb2.STEP_STATUS_FAILED:
            changed.append(report.step)
            report.status = VALUE

    later_reports.change = change
    async with one_worker(enable_faults=True) as (stack, _):
        fault = operations_pb2.Fault(kind=operations_pb2.FAULT_KIND_STEP_ERROR, count=1)
        await stack.operations.SetFaults(operations_pb2.SetFaultsRequest(faults=[fault]))
        outputs = await asyncio.gather(*(stack.generate(text=f"request {number}") for number in range(3)))
        assert link_problems(stack) == [""]
    assert len(changed) == 1
    assert [output.text[0] for output in outputs] == [f"request {number}" for number in range(3)]


# The worker, as a reader of what a scheduler says


async def test_worker_says_once_that_it_ignores_unknown_messages_and_fields_and_goes_on(
    worker: StepWorker,
) -> None:
    async with worker.attach() as scheduler:
        with capture_logs() as logs:
            await scheduler.call.write(with_unknown_member(worker_pb2.SchedulerMessage(), "message"))
            for handle in (1, 2):
                scheduler.step += 1
                plan = worker_pb2.Plan(
                    step=scheduler.step, admit=[admit(handle)], prefill_handles=[handle], prefill_tokens=[512]
                )
                await scheduler.call.write(later(worker_pb2.SchedulerMessage(plan=plan)))
                report = await scheduler.report()
                assert report.status == worker_pb2.STEP_STATUS_OK
                assert handle in report.token_handles
            cancel = worker_pb2.SchedulerMessage(cancel=worker_pb2.Cancel(handles=[2]))
            await scheduler.call.write(later(cancel))
            report = await scheduler.run()
            assert list(report.released) == [2]
            assert list(report.token_handles) == [1]
        ignored = [entry for entry in logs if entry["event"] == "unknown_fields_ignored"]
        assert [entry["message"] for entry in ignored] == ["SchedulerMessage"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [("priority", {"priority": VALUE}), ("sampling.structured", {"sampling": UNKNOWN_KIND})],
)
async def test_worker_refuses_an_admission_that_it_cannot_understand_and_no_other(
    worker: StepWorker, field: str, fields: dict[str, Any]
) -> None:
    async with worker.attach() as scheduler:
        other = admit(1, tokens=80, **fields)
        # It begins with the prompt of the one that is refused.
        follower = worker_pb2.Admit(handle=2, prompt_len=80, prompt_of=1)
        follower.sampling.max_tokens = 5
        follower.keys = keys_of(other)
        report = await scheduler.run(
            admit=[other, follower], prefill_handles=[1, 2], prefill_tokens=[512, 512]
        )
        assert [(entry.handle, entry.reason) for entry in report.refused] == [
            (1, worker_pb2.REFUSE_REASON_UNSUPPORTED)
        ]
        assert report.refused[0].detail.startswith(field)
        assert list(report.token_handles) == [2]
        assert (report.live_count, report.status) == (1, worker_pb2.STEP_STATUS_OK)
