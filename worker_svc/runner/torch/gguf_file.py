"""Reads a GGUF file: metadata, tokenizer and (dequantized) weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from worker_svc.errors import ModelLoadError
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.config import ModelConfig, check_config
from worker_svc.runner.torch.tokenizer_gguf import text_side_of

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_MALFORMED: Final = (ValueError, IndexError, KeyError, TypeError, OverflowError, NotImplementedError)
"""What the reader raises on a damaged file, UnicodeDecodeError included."""


class _Reader(GGUFReader):
    """Parses over a plain array: slicing a memmap costs four times as much, and there are 150,000 slices."""

    @property  # type: ignore[override] # the base class needs no more than an array
    def data(self) -> np.ndarray[Any, Any]:
        return self._plain

    @data.setter
    def data(self, value: np.ndarray[Any, Any]) -> None:
        self._plain = value.view(np.ndarray)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; weights stay on disk until they are read.

    Raises:
        ModelLoadError: the file is missing, damaged or not supported; what is wrong is named.
    """
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _MALFORMED as error:
        raise ModelLoadError(f"{path}: not a whole GGUF file: {error}") from error

    def read(name: str) -> torch.Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{path}: no weight {name}")
        try:
            return torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W"))
        except _MALFORMED as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(f"{path}: weight {tensor.name} ({kind}) cannot be read: {error}") from error

    config = _config(metadata, str(path), tied="lm_head.weight" not in tensors)
    return Checkpoint(
        source=str(path),
        config=config,
        text=text_side_of(metadata, str(path)),
        names=frozenset(tensors),
        read=read,
        rope_pairs_adjacent=config.architecture == "LlamaForCausalLM",
        rope_factors=read(_ROPE_FACTORS) if _ROPE_FACTORS in tensors else None,
    )


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if not name.startswith("blk."):
        return name
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"


def _config(metadata: Mapping[str, Any], source: str, *, tied: bool) -> ModelConfig:
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{source}: architecture {name} is not supported by the torch runner"
            f" (supported in GGUF: {', '.join(_ARCHITECTURES)})"
        )

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if get("expert_count", 0):
        raise ModelLoadError(f"{source}: mixtures of experts are not supported by the torch runner")
    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"{source}: rope type {scaling} is not supported (supported: none, llama3)")
    try:
        heads = int(metadata[f"{name}.attention.head_count"])
        hidden = int(metadata[f"{name}.embedding_length"])
        config = ModelConfig(
            architecture=_ARCHITECTURES[name],
            vocab_size=int(get("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
            hidden_size=hidden,
            intermediate_size=int(metadata[f"{name}.feed_forward_length"]),
            num_layers=int(metadata[f"{name}.block_count"]),
            num_heads=heads,
            num_kv_heads=int(get("attention.head_count_kv", heads)),
            head_dim=int(get("attention.key_length", hidden // heads)),
            rms_norm_eps=float(metadata[f"{name}.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            max_position_embeddings=int(metadata[f"{name}.context_length"]),
            tie_word_embeddings=tied,
            sliding_window=get("attention.sliding_window"),
        )
    except KeyError as error:
        raise ModelLoadError(f"{source}: {error.args[0]} is missing from the metadata") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source}: malformed metadata: {error}") from error
    rotary = get("rope.dimension_count", config.head_dim)
    if rotary != config.head_dim:
        raise ModelLoadError(
            f"{source}: rotary embedding of {rotary} out of {config.head_dim} is not supported"
        )
    return check_config(config, source)
