"""What only the worker reads from the wire and writes to it: faults to inject, its own description."""

from __future__ import annotations

from octavo.protocol.convert import ProtocolError, geometry_to_proto, sampling_to_proto
from octavo.protocol.steps import PROTOCOL_VERSION
from octavo.v1 import operations_pb2, worker_pb2

from worker_svc.api.session import Terms
from worker_svc.engine.faults import Fault, FaultKind
from worker_svc.runner.base import LoadedModel


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


def describe(info: LoadedModel, terms: Terms) -> worker_pb2.WorkerDescription:
    """Return the answer to `Worker.Describe`."""
    return worker_pb2.WorkerDescription(
        worker_id=terms.worker_id,
        incarnation=terms.incarnation,
        protocol_version=PROTOCOL_VERSION,
        model_id=info.model_id,
        revision=info.revision,
        runner=info.runner,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        vocab_size=info.vocab_size,
        max_model_len=terms.max_model_len,
        eos_token_ids=info.text.eos_token_ids,
        bos_token_id=info.text.bos_token_id,
        generation_defaults=sampling_to_proto(info.text.generation_defaults),
        chat_template=info.text.chat_template,
        geometry=geometry_to_proto(terms.geometry),
        max_num_seqs=terms.limits.max_num_seqs,
        max_num_batched_tokens=terms.limits.max_num_batched_tokens,
        tokenizer_files=[
            worker_pb2.TokenizerFile(name=name, content=content)
            for name, content in info.text.tokenizer_files.items()
        ],
        special_tokens=info.text.special_tokens,
        adapters=info.adapters,
        add_bos_token=info.text.add_bos_token,
        devices=terms.num_devices,
        aliases=info.aliases,
        limits_reason=terms.limits.reason,
        shared_sampling=True,
        structured_output=terms.structured_output,
    )
