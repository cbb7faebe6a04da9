from __future__ import annotations

import math

import pytest
from octavo.protocol.convert import ProtocolError
from octavo.v1 import operations_pb2 as pb

from worker_svc.api.convert import fault_from_proto, fault_to_proto
from worker_svc.engine.faults import Fault, FaultKind


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.CRASH),
        Fault(FaultKind.SLOW_STEP, probability=0.25, count=3, duration_s=1.5),
        Fault(FaultKind.STEP_ERROR, token_id=7, count=0),
    ],
)
def test_fault_round_trip_is_lossless(fault: Fault) -> None:
    assert fault_from_proto(fault_to_proto(fault)) == fault


def test_fault_kinds_are_those_of_the_proto() -> None:
    wire = {name.removeprefix("FAULT_KIND_"): number for name, number in pb.FaultKind.items() if number}
    assert wire == {kind.name: kind.value for kind in FaultKind}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Fault(), "faults.kind"),
        (pb.Fault(kind=pb.FAULT_KIND_HANG, probability=math.nan), "faults.probability"),
        (pb.Fault(kind=pb.FAULT_KIND_HANG, probability=1.5), "faults.probability"),
    ],
)
def test_fault_that_is_none_is_refused(message: pb.Fault, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        fault_from_proto(message)
    assert caught.value.field == field
