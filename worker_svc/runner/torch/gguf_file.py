"""Reads the weights of a GGUF file under the names that Hugging Face has for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from worker_svc.errors import ModelLoadError
from worker_svc.models.gguf import open_gguf_file
from worker_svc.models.gguf_text import gguf_text
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.config import ModelConfig, check_config
from worker_svc.runner.torch.families.family import SOME_LAYERS_ONLY, Family
from worker_svc.runner.torch.families.registry import GGUF_FAMILIES

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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; weights stay on disk until they are read.

    Raises:
        ModelLoadError: the file is missing, damaged or not supported; what is wrong is named.
    """
    file = open_gguf_file(path)
    family = _family_of(file.metadata, str(path))
    layer_names = _LAYER_NAMES | dict(family.gguf_names)
    gguf_names = {_hf_name(name, layer_names): name for name in file.tensors}

    def read(name: str) -> torch.Tensor:
        if name not in gguf_names:
            raise ModelLoadError(f"{path}: no weight {name}")
        return torch.from_numpy(file.read(gguf_names[name]))

    return Checkpoint(
        source=str(path),
        config=_config(file.metadata, family, str(path), tied="lm_head.weight" not in gguf_names),
        text=gguf_text(file.metadata, path),
        names=frozenset(gguf_names),
        read=read,
        rope_pairs_adjacent=family.gguf_pairs_adjacent,
        rope_factors=read(_ROPE_FACTORS) if _ROPE_FACTORS in gguf_names else None,
    )


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{layer_names.get(part, part)}.{kind}"
        case _:
            return name


def _family_of(metadata: Mapping[str, Any], source: str) -> Family:
    name = metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelLoadError(
            f"{source}: architecture {name} is not supported by the torch runner"
            f" (supported in GGUF: {', '.join(GGUF_FAMILIES)})"
        )
    return family


def _config(metadata: Mapping[str, Any], family: Family, source: str, *, tied: bool) -> ModelConfig:
    name = family.gguf

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if get("expert_count", 0):
        raise ModelLoadError(f"{source}: mixtures of experts are not supported by the torch runner")
    if get("attention.sliding_window_pattern") is not None:
        raise ModelLoadError(f"{source}: {SOME_LAYERS_ONLY}")
    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"{source}: rope type {scaling} is not supported (supported: none, llama3)")
    try:
        heads = int(metadata[f"{name}.attention.head_count"])
        hidden = int(metadata[f"{name}.embedding_length"])
        config = ModelConfig(
            architecture=family.architecture,
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
