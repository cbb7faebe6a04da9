"""Qwen3: Llama with an RMS norm over each head's queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from worker_svc.runner.torch.block import LlamaBlock, WeightReader
from worker_svc.runner.torch.families.family import Family
from worker_svc.runner.torch.families.qwen2 import window_if_used


class Qwen3Block(LlamaBlock):
    """A block whose queries and keys are normalized head by head before they are rotated."""

    def __init__(self, weights: WeightReader, index: int) -> None:
        super().__init__(weights, index)
        config, prefix = weights.config, f"model.layers.{index}.self_attn"
        query = weights.read_paired(f"{prefix}.q_norm.weight", (config.head_dim,))
        key = weights.read_paired(f"{prefix}.k_norm.weight", (config.head_dim,))
        by_head = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
        self._head_norm = weights.norm_of(by_head)  # [heads + kv_heads, head_dim]

    def normalize_(self, heads: Tensor) -> None:
        """Norm each head."""
        heads.copy_(self._head_norm(heads))


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    gguf="qwen3",
    block=Qwen3Block,
    head_dim=128,
    sliding_window=window_if_used,
    gguf_names={"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
)
