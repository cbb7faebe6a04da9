"""Tiny models of each family with random weights, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 300
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama_tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama_multi_head": LlamaConfig(**{**_SHAPE, "num_key_value_heads": 6}),
    "llama_biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None, head_dim=16),
    "mistral_sliding": MistralConfig(**_SHAPE, sliding_window=21),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
}


def small_llama(context: int) -> LlamaConfig:
    """What runners and programs of others are compared with transformers on: sure of its tokens."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )


def save_model(config: PreTrainedConfig, folder: Path, seed: int = 0, **save: Any) -> PreTrainedModel:
    """Save a random model and a tokenizer, and return the model in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)  # as made they are all 0 or all 1
    model.save_pretrained(folder, **save)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
