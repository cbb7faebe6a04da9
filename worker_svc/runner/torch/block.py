"""The block that Llama-like models share, and how its weights are read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.errors import ModelLoadError
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.layers import Linear, RmsNorm, adjacent_pairs, make_linear, rotate_


class Attention(Protocol):
    """How the tokens of one step attend; knows where their keys and values are kept."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the keys and values of `qkv` [tokens, q + k + v], attend, and return [tokens, q]."""


class Block(Protocol):
    """One layer of a decoder."""

    def __call__(self, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        """Return the layer's output for x [tokens, hidden], which may be overwritten.

        `turns` [tokens, 1, head_dim / 2] rotate queries and keys.
        """


class LlamaBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)). Families override what they do otherwise."""

    norm_names = ("input_layernorm", "post_attention_layernorm")
    """Weights of the norms of attention and MLP."""

    def __init__(self, weights: WeightReader, index: int) -> None:
        prefix = f"model.layers.{index}"
        config = weights.config
        self._index = index
        self._head_dim = config.head_dim
        self._rotated = config.q_size + config.kv_size
        self.attention_norm, self.mlp_norm = (
            weights.norm(f"{prefix}.{name}.weight") for name in self.norm_names
        )
        self.qkv = weights.qkv(f"{prefix}.self_attn")
        self.output = weights.linear(f"{prefix}.self_attn.o_proj", config.hidden_size, config.q_size)
        self.gate_up = weights.gate_up(f"{prefix}.mlp")
        self.down = weights.linear(f"{prefix}.mlp.down_proj", config.hidden_size, config.intermediate_size)

    def __call__(self, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        """See `Block`."""
        x = self.output.add(self.attended(self.attention_norm(x), turns, attention), x)
        return self.down.add(self.gated(self.mlp_norm(x)), x)

    def attended(self, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        """Return what attention makes of x, [tokens, q], before the output projection."""
        qkv = self.qkv(x)  # [tokens, q + k + v]
        heads = qkv[:, : self._rotated].view(len(qkv), -1, self._head_dim)
        self.normalize_(heads)
        rotate_(heads, turns)
        return attention(self._index, qkv)

    def normalize_(self, heads: Tensor) -> None:
        """Change queries and keys, [tokens, heads + kv_heads, head_dim], in place before they are rotated."""

    def gated(self, x: Tensor) -> Tensor:
        """Return silu(gate(x)) * up(x), [tokens, intermediate]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class WeightReader:
    """Reads weights, checks their shapes, and fuses and lays out what belongs together.

    A layer is read at a time, so that a model is in memory about once.
    """

    def __init__(self, checkpoint: Checkpoint, compute: Compute) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._compute = compute

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight as it is stored.

        Raises:
            ModelLoadError: it is missing, damaged, or of another shape or kind.
        """
        weight = self._checkpoint.read(name)
        if weight.shape != shape:
            raise ModelLoadError(
                f"{self._checkpoint.source}: weight {name} has shape {list(weight.shape)},"
                f" but the configuration makes it {list(shape)}"
            )
        if not weight.is_floating_point():
            raise ModelLoadError(f"{self._checkpoint.source}: weight {name} has type {weight.dtype}")
        return weight

    def read_paired(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight of queries or keys with rotary pairs next to each other."""
        weight = self.read(name, shape)
        if self._checkpoint.rope_pairs_adjacent:
            return weight
        return adjacent_pairs(weight, self.config.head_dim)

    def norm(self, name: str) -> RmsNorm:
        """Return a norm over the hidden size."""
        return self.norm_of(self.read(name, (self.config.hidden_size,)))

    def norm_of(self, weight: Tensor) -> RmsNorm:
        """Return a norm over the last dimension of `weight`."""
        weight = weight.to(self._compute.device, self._compute.activations)
        return RmsNorm(weight, self.config.rms_norm_eps)

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """Return a layer, with its bias if it has one."""
        weight, bias = self.read(f"{name}.weight", (rows, columns)), self._optional(f"{name}.bias", rows)
        return make_linear(weight, bias, self._compute)

    def qkv(self, prefix: str) -> Linear:
        """Return the projections to queries, keys and values as one layer."""
        has_bias = f"{prefix}.q_proj.bias" in self._checkpoint.names
        return make_linear(
            self._qkv(prefix, "weight"), self._qkv(prefix, "bias") if has_bias else None, self._compute
        )

    def gate_up(self, prefix: str) -> Linear:
        """Return the projections to gate and up of an MLP as one layer."""
        width = self.config.intermediate_size
        parts = [
            self.read(f"{prefix}.{part}_proj.weight", (width, self.config.hidden_size))
            for part in ("gate", "up")
        ]
        biases = [self._optional(f"{prefix}.{part}_proj.bias", width) for part in ("gate", "up")]
        present = [bias for bias in biases if bias is not None]
        return make_linear(torch.cat(parts), torch.cat(present) if len(present) == 2 else None, self._compute)

    def embedding_and_head(self) -> tuple[Tensor, Linear]:
        """Return the table of the input tokens, [vocab, hidden], and the layer to the logits."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        weight = self.read("model.embed_tokens.weight", shape)
        embedding = weight.to(self._compute.device, self._compute.weights)
        if not self.config.tie_word_embeddings:
            weight = self.read("lm_head.weight", shape)
        elif self._compute.device.type != "cpu":
            weight = embedding  # a GPU multiplies by it as it is
        return embedding, make_linear(weight, None, self._compute)

    def _optional(self, name: str, rows: int) -> Tensor | None:
        return self.read(name, (rows,)) if name in self._checkpoint.names else None

    def _qkv(self, prefix: str, kind: str) -> Tensor:
        c = self.config
        tail = (c.hidden_size,) if kind == "weight" else ()
        query = self.read_paired(f"{prefix}.q_proj.{kind}", (c.q_size, *tail))
        key = self.read_paired(f"{prefix}.k_proj.{kind}", (c.kv_size, *tail))
        value = self.read(f"{prefix}.v_proj.{kind}", (c.kv_size, *tail))
        return torch.cat([query, key, value])
