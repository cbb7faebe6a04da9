"""Plans on their way to a worker."""

from __future__ import annotations

from octavo.protocol import convert
from octavo.v1 import worker_pb2

from scheduler_svc.fleet.worker_link import _plan_message
from tests.unit.octavo.test_convert import siblings


async def test_long_prompts_are_sent_in_slices_and_once() -> None:
    plan = siblings(4, 20_000)

    message = await _plan_message(plan, share_sampling=True)

    sent = worker_pb2.Plan.FromString(message.plan.SerializeToString())
    assert convert.plan_from_proto(sent) == plan
    # Two prompts of 20,000 tokens and their keys; four more would not fit.
    assert message.ByteSize() < 200_000
