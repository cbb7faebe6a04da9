"""OLMo 2: norms after attention and MLP instead of before, and over all queries and all keys at once."""

from __future__ import annotations

from torch import Tensor

from worker_svc.runner.torch.block import Attention, LlamaBlock, WeightReader
from worker_svc.runner.torch.families.family import Family


class Olmo2Block(LlamaBlock):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(self, weights: WeightReader, index: int) -> None:
        super().__init__(weights, index)
        config, prefix = weights.config, f"model.layers.{index}.self_attn"
        self._num_heads = config.num_heads
        self._query_norm = weights.norm_of(weights.read_paired(f"{prefix}.q_norm.weight", (config.q_size,)))
        self._key_norm = weights.norm_of(weights.read_paired(f"{prefix}.k_norm.weight", (config.kv_size,)))

    def __call__(self, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        """See `Block`."""
        x = self.attention_norm(self.output(self.attended(x, turns, attention))).add_(x)
        return self.mlp_norm(self.down(self.gated(x))).add_(x)

    def normalize_(self, heads: Tensor) -> None:
        """Norm the queries of all heads together, and so the keys."""
        query = heads[:, : self._num_heads].view(len(heads), -1)
        key = heads[:, self._num_heads :].view(len(heads), -1)
        query.copy_(self._query_norm(query))
        key.copy_(self._key_norm(key))


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    gguf="olmo2",
    block=Olmo2Block,
    gguf_names={
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
