"""The fake scheduler as one of a later version: everything that it sends has more in it than we know.

Prompts steer it further: `later reason` ends for a reason that we do not know, `later event` has an event
of a kind that we do not know before each of its own, `broken event` has one for a choice that was not asked
for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import operations_pb2

from tests.later_version import VALUE, later, with_unknown_member
from tests.unit.client.fake_scheduler import FakeOperations, FakeScheduler


class LaterOperations(FakeOperations):
    """Its queues have a class that we do not know."""

    async def GetStatus(  # noqa: N802 # named by the contract
        self, request: operations_pb2.GetStatusRequest, context: object
    ) -> operations_pb2.GetStatusResponse:
        response = await super().GetStatus(request, context)
        response.status.queues.add(model="fake", priority=VALUE, waiting=9)
        return later(response)


class LaterScheduler(FakeScheduler):
    """Speaks a later version."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = LaterOperations()

    async def Session(  # noqa: N802 # named by the contract
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionEvent],
    ) -> AsyncIterator[pb.SessionEvent]:
        async for message in super().Session(request_iterator, context):
            yield later(message)

    def _advance(self, request_id: str, choice: Any) -> list[pb.RequestEvent]:
        events = super()._advance(request_id, choice)
        text = choice.request.text
        if text == "later reason" and choice.done:
            events[-1].finished.reason = VALUE
        if text == "later event":
            unknown = pb.RequestEvent(request_id=request_id)
            events.insert(0, with_unknown_member(unknown, "event"))
        if text == "broken event":
            delta = pb.Delta(choice=99, text="of no choice")
            events.insert(0, pb.RequestEvent(request_id=request_id, delta=delta))
        return events

    async def ListModels(  # noqa: N802 # named by the contract
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return later(await super().ListModels(request, context))
