"""What the scheduler's public services say of a model."""

from __future__ import annotations

from octavo.protocol.convert_sampling import sampling_to_proto
from octavo.sampling import OF_MODEL, SamplingParams
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.fleet.models import ServedModel


def model_to_proto(model: ServedModel) -> pb.Model:
    """Convert what clients may know of a model."""
    defaults = SamplingParams(**{name: getattr(model.defaults, name) for name in OF_MODEL})
    return pb.Model(
        id=model.id,
        revision=model.revision,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        has_chat_template=model.has_chat_template,
        workers=len(model.workers),
        adapters=sorted(model.adapters),
        generation_defaults=sampling_to_proto(defaults),
        aliases=model.aliases,
        tool_format=model.tool_format,
        reasoning_format=model.reasoning_format,
    )
