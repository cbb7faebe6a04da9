"""What a worker says of itself: everything that a scheduler needs to be model-free."""

from __future__ import annotations

from octavo.protocol.convert import geometry_to_proto, sampling_to_proto
from octavo.protocol.steps import PROTOCOL_VERSION
from octavo.v1 import worker_pb2

from worker_svc.api.session import Terms
from worker_svc.runner.base import ModelInfo


def describe(info: ModelInfo, terms: Terms) -> worker_pb2.WorkerDescription:
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
        max_model_len=terms.sizing.max_model_len,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        generation_defaults=sampling_to_proto(info.generation_defaults),
        chat_template=info.chat_template,
        geometry=geometry_to_proto(terms.sizing.geometry),
        max_num_seqs=terms.max_num_seqs,
        max_num_batched_tokens=terms.max_num_batched_tokens,
        tokenizer_files=[
            worker_pb2.TokenizerFile(name=name, content=content)
            for name, content in info.tokenizer_files.items()
        ],
        special_tokens=info.special_tokens,
        adapters=info.adapters,
        add_bos_token=info.add_bos_token,
        devices=terms.num_devices,
    )
