"""What only a later version understands in a message; see "Later versions" in docs/protocol.md."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.protocol.steps import Priority, Refused, RefuseReason
from octavo.v1 import worker_pb2

_PRIORITIES: Final = {0, *Priority}


def unknown_fields(message: Message) -> tuple[int, ...]:
    """Return the numbers of the fields, in the message itself, that this version does not know."""
    found: Any = UnknownFieldSet(message)  # the stubs lag
    return tuple(sorted({one.field_number for one in found}))


def refuse_unknown(plan: worker_pb2.Plan) -> tuple[Refused, ...]:
    """Refuse the admissions of a plan whose meaning this version does not know.

    What is not understood is cleared in the message, so that the rest of the plan can be read: other
    admissions may begin with the same prompt.
    """
    refused = []
    unknown_sampling: set[int] = set()
    for admit in plan.admit:
        problem = None
        if admit.priority not in _PRIORITIES:
            problem = f"priority: unknown value {admit.priority}"
            admit.ClearField("priority")
        if admit.sampling.HasField("structured") and unknown_fields(admit.sampling.structured):
            unknown_sampling.add(admit.handle)
            admit.sampling.ClearField("structured")
        if admit.handle in unknown_sampling or admit.sampling_of in unknown_sampling:
            problem = "sampling.structured: of an unknown kind"
        if problem is not None:
            refused.append(Refused(admit.handle, RefuseReason.UNSUPPORTED, problem))
    return tuple(refused)
