"""A scheduler of a later version: what the SDK does not know harms nothing that it does know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from octavo import AsyncClient, FinishReason, GenerateResult, InternalError, OctavoError, Priority

from tests.unit.client.fake_scheduler import expected_text
from tests.unit.client.later_scheduler import LaterScheduler


@pytest.fixture
async def scheduler() -> AsyncIterator[LaterScheduler]:
    fake = LaterScheduler()
    await fake.start()
    yield fake
    await fake.stop()


async def beside(client: AsyncClient, scheduler: LaterScheduler, prompt: str) -> GenerateResult | OctavoError:
    """Run a prompt beside two others that live as long as it does, and see that those are well."""
    await scheduler.hold()
    running = [
        asyncio.create_task(client.generate(text, seed=seed, max_tokens=4))
        for seed, text in enumerate(("a neighbour", prompt, "another"), 1)
    ]
    await scheduler.until(lambda: len(scheduler.requests) == 3)
    await scheduler.allow()
    first, outcome, last = await asyncio.gather(*running, return_exceptions=True)
    for seed, neighbour in ((1, first), (3, last)):
        assert isinstance(neighbour, GenerateResult)
        assert neighbour.finish_reason is FinishReason.LENGTH
        assert neighbour.text == expected_text(seed, 4)
    assert scheduler.sessions == 1
    assert isinstance(outcome, GenerateResult | OctavoError)
    return outcome


async def test_unknown_fields_in_every_message_change_nothing(
    client: AsyncClient, scheduler: LaterScheduler
) -> None:
    outcome = await beside(client, scheduler, "as ever")
    assert isinstance(outcome, GenerateResult)
    assert (outcome.text, outcome.usage.cached_tokens) == (expected_text(2, 4), 1)
    assert [model.id for model in await client.models()] == ["fake"]


async def test_unknown_finish_reason_is_unknown_and_the_output_whole(
    client: AsyncClient, scheduler: LaterScheduler
) -> None:
    outcome = await beside(client, scheduler, "later reason")
    assert isinstance(outcome, GenerateResult)
    assert outcome.finish_reason is FinishReason.UNKNOWN
    assert outcome.text == expected_text(2, 4)


async def test_unknown_kind_of_event_is_passed_over(client: AsyncClient, scheduler: LaterScheduler) -> None:
    outcome = await beside(client, scheduler, "later event")
    assert isinstance(outcome, GenerateResult)
    assert outcome.text == expected_text(2, 4)


async def test_event_that_cannot_be_read_fails_only_its_request(
    client: AsyncClient, scheduler: LaterScheduler
) -> None:
    outcome = await beside(client, scheduler, "broken event")
    assert isinstance(outcome, InternalError)
    await scheduler.until(lambda: len(scheduler.cancelled) == 1)


async def test_unknown_code_and_reason_of_an_error_reach_the_caller(
    client: AsyncClient, scheduler: LaterScheduler
) -> None:
    outcome = await beside(client, scheduler, "refuse LATER_REASON 77")
    assert isinstance(outcome, OctavoError)
    assert outcome.reason == "LATER_REASON"


async def test_unknown_class_in_the_status_is_no_class(
    client: AsyncClient, scheduler: LaterScheduler
) -> None:
    status = await client.status()
    assert [queue.priority for queue in status.queues] == [Priority.INTERACTIVE, Priority.STANDARD, None]
    assert status.queues[-1].waiting == 9
    assert [worker.worker_id for worker in status.workers] == ["w0", "w1", "w2"]
