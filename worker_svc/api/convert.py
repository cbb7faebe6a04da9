"""What only the worker reads from the wire: faults to inject."""

from __future__ import annotations

from octavo.protocol.convert import ProtocolError
from octavo.v1 import operations_pb2

from worker_svc.engine.faults import Fault, FaultKind


def fault_to_proto(fault: Fault) -> operations_pb2.Fault:
    """Convert; durations travel in whole milliseconds."""
    return operations_pb2.Fault(
        kind=operations_pb2.FaultKind.ValueType(fault.kind),
        probability=fault.probability,
        count=fault.count,
        duration_ms=round(fault.duration_s * 1000),
        token_id=fault.token_id,
    )


def fault_from_proto(message: operations_pb2.Fault) -> Fault:
    """Convert; raises ProtocolError when the kind is unknown or the probability is none."""
    try:
        kind = FaultKind(message.kind)
    except ValueError:
        raise ProtocolError("faults.kind", f"unknown value {message.kind}") from None
    probability = message.probability if message.HasField("probability") else 1.0
    if not 0.0 <= probability <= 1.0:
        raise ProtocolError("faults.probability", f"must be in [0, 1], got {probability}")
    return Fault(
        kind=kind,
        probability=probability,
        count=message.count if message.HasField("count") else None,
        duration_s=message.duration_ms / 1000,
        token_id=message.token_id if message.HasField("token_id") else None,
    )
