"""The Llama family in one forward pass over a packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.errors import ModelLoadError
from worker_svc.runner.base import Progress
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.linear import Linear, make_linear
from worker_svc.runner.torch.norm import RmsNorm
from worker_svc.runner.torch.rope import adjacent_pairs, rotate_, rotations


class Attention(Protocol):
    """How the tokens of one step attend; knows where their keys and values are kept."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the keys and values of `qkv` [tokens, q + k + v], attend, and return [tokens, q]."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Model:
    """Weights of a decoder; T tokens of any number of sequences go through it in one call."""

    def __init__(self, checkpoint: Checkpoint, compute: Compute, max_len: int, progress: Progress) -> None:
        self.config = checkpoint.config
        self.compute = compute
        loader = _Loader(checkpoint, compute)
        self._layers = []
        for index in range(self.config.num_layers):
            progress("loading weights", index / (self.config.num_layers + 1))
            self._layers.append(loader.layer(index))
        self._norm = loader.norm("model.norm.weight")
        self._embedding, self._head = loader.embedding_and_head()
        self.max_len = max_len
        self._turns = rotations(self.config, max_len, checkpoint.rope_factors).to(compute.device)
        progress("loading weights", 1.0)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the last layer's output, [T, hidden], for `token_ids` [T] at `positions` [T]."""
        config = self.config
        rotated = config.q_size + config.kv_size
        turns = self._turns[positions].unsqueeze(1)  # [T, 1, head_dim / 2]
        x = F.embedding(token_ids, self._embedding).to(self.compute.activations)  # [T, hidden]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x))  # [T, q + k + v]
            heads = qkv[:, :rotated].view(len(qkv), -1, config.head_dim)  # [T, heads + kv_heads, head_dim]
            if layer.qk_norm is not None:
                heads.copy_(layer.qk_norm(heads))
            rotate_(heads, turns)
            x = layer.output.add(attention(index, qkv), x)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)  # [T, intermediate]
            x = layer.down.add(F.silu(gate).mul_(up), x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, vocab] of R rows of the last layer's output."""
        return self._head(self._norm(hidden)).float()


class _Loader:
    """Reads weights and fuses them layer by layer, so that a model is in memory about once."""

    def __init__(self, checkpoint: Checkpoint, compute: Compute) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._compute = compute

    def layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        c = self._config
        attention = f"{prefix}.self_attn"
        return _Layer(
            attention_norm=self.norm(f"{prefix}.input_layernorm.weight"),
            qkv=make_linear(self._qkv(attention, "weight"), self._qkv_bias(attention), self._compute),
            qk_norm=self._qk_norm(attention),
            output=self._linear(f"{attention}.o_proj", c.hidden_size, c.q_size),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._gate_up(f"{prefix}.mlp"),
            down=self._linear(f"{prefix}.mlp.down_proj", c.hidden_size, c.intermediate_size),
        )

    def norm(self, name: str) -> RmsNorm:
        return self._norm_of(self._read(name, (self._config.hidden_size,)))

    def embedding_and_head(self) -> tuple[Tensor, Linear]:
        shape = (self._config.vocab_size, self._config.hidden_size)
        weight = self._read("model.embed_tokens.weight", shape)
        embedding = weight.to(self._compute.device, self._compute.weights)
        if not self._config.tie_word_embeddings:
            weight = self._read("lm_head.weight", shape)
        elif self._compute.device.type != "cpu":
            weight = embedding  # a GPU multiplies by it as it is
        return embedding, make_linear(weight, None, self._compute)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._checkpoint.read(name)
        if weight.shape != shape:
            raise ModelLoadError(
                f"{self._checkpoint.source}: weight {name} has shape {list(weight.shape)},"
                f" but the configuration makes it {list(shape)}"
            )
        if not weight.is_floating_point():
            raise ModelLoadError(f"{self._checkpoint.source}: weight {name} has type {weight.dtype}")
        return weight

    def _linear(self, name: str, rows: int, columns: int) -> Linear:
        return make_linear(
            self._read(f"{name}.weight", (rows, columns)), self._optional(f"{name}.bias", rows), self._compute
        )

    def _optional(self, name: str, rows: int) -> Tensor | None:
        return self._read(name, (rows,)) if name in self._checkpoint.names else None

    def _gate_up(self, prefix: str) -> Linear:
        width = self._config.intermediate_size
        parts = [
            self._read(f"{prefix}.{part}_proj.weight", (width, self._config.hidden_size))
            for part in ("gate", "up")
        ]
        biases = [self._optional(f"{prefix}.{part}_proj.bias", width) for part in ("gate", "up")]
        present = [bias for bias in biases if bias is not None]
        return make_linear(torch.cat(parts), torch.cat(present) if len(present) == 2 else None, self._compute)

    def _qkv(self, prefix: str, kind: str) -> Tensor:
        c = self._config
        tail = (c.hidden_size,) if kind == "weight" else ()
        query = self._read(f"{prefix}.q_proj.{kind}", (c.q_size, *tail))
        key = self._read(f"{prefix}.k_proj.{kind}", (c.kv_size, *tail))
        value = self._read(f"{prefix}.v_proj.{kind}", (c.kv_size, *tail))
        return torch.cat([self._paired(query), self._paired(key), value])

    def _qkv_bias(self, prefix: str) -> Tensor | None:
        return self._qkv(prefix, "bias") if f"{prefix}.q_proj.bias" in self._checkpoint.names else None

    def _norm_of(self, weight: Tensor) -> RmsNorm:
        weight = weight.to(self._compute.device, self._compute.activations)
        return RmsNorm(weight, self._config.rms_norm_eps)

    def _qk_norm(self, prefix: str) -> RmsNorm | None:
        if f"{prefix}.q_norm.weight" not in self._checkpoint.names:
            return None
        c = self._config
        query = self._paired(self._read(f"{prefix}.q_norm.weight", (c.head_dim,)))
        key = self._paired(self._read(f"{prefix}.k_norm.weight", (c.head_dim,)))
        by_head = torch.cat([query.expand(c.num_heads, -1), key.expand(c.num_kv_heads, -1)])
        return self._norm_of(by_head)  # [heads + kv_heads, head_dim]

    def _paired(self, weight: Tensor) -> Tensor:
        if self._checkpoint.rope_pairs_adjacent:
            return weight
        return adjacent_pairs(weight, self._config.head_dim)
