"""Writes tiny models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from tests.unit.worker.runner.torch.families import VOCAB_SIZE

ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: str = "F32",
    rope_factors: torch.Tensor | None = None,
    **metadata: Any,
) -> None:
    """Write `model`; `metadata` adds to or replaces what would be written, None leaves out."""
    config = model.config
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else None,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    }
    writer = gguf.GGUFWriter(path, architecture)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    for name, value in (values | metadata.pop("architecture_metadata", {})).items():
        _add(writer, f"{architecture}.{name}", value)
    for name, value in (tokenizer_metadata() | metadata).items():
        _add(writer, name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = permuted(tensor, heads)  # noqa: PLW2901 # as the converter does
        data = tensor.float().numpy()
        stored = gguf.GGMLQuantizationType[kind if data.ndim == 2 else "F32"]
        packed = gguf.quants.quantize(data, stored)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, packed, raw_dtype=stored)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the two rotary halves of each head."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()


def tokenizer_metadata() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>", "<|im_end|>", "<think>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    pieces = [merge.replace(" ", "") for merge in merges]
    tokens = special + alphabet + pieces
    tokens += [f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 4] + [1] * (VOCAB_SIZE - 5),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
