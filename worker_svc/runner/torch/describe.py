"""What a loaded model says of itself."""

from __future__ import annotations

from worker_svc.runner.base import ModelInfo
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.kv_pool import kv_bytes_per_token
from worker_svc.start.models import ResolvedModel


def describe(model: ResolvedModel, checkpoint: Checkpoint, compute: Compute, max_model_len: int) -> ModelInfo:
    """Return the description of `model`, loaded from `checkpoint` for `compute`."""
    text = checkpoint.text
    return ModelInfo(
        model_id=model.model_id,
        revision=model.revision,
        runner="torch",
        dtype=_name(compute.weights),
        kv_dtype=_name(compute.activations),
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        add_bos_token=text.add_bos_token,
        generation_defaults=text.generation_defaults,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        tokenizer_files=text.tokenizer_files,
        kv_bytes_per_token=kv_bytes_per_token(checkpoint.config, compute),
        device=str(compute.device),
    )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
