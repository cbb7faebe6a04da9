"""Reads a Hugging Face model folder: config.json and safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.errors import ModelLoadError
from worker_svc.models.files import read_json
from worker_svc.models.text import folder_text
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.config import Llama3Rope, ModelConfig, check_config
from worker_svc.runner.torch.families.registry import FAMILIES


def open_hf_folder(folder: Path) -> Checkpoint:
    """Open a model folder; weights stay on disk until they are read.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported; it is named.
    """
    raw = read_json(folder / "config.json")
    where = dict(_weight_map(folder))

    def read(name: str) -> torch.Tensor:
        path = where.get(name)
        if path is None:
            raise ModelLoadError(f"{folder}: no weight {name} in its safetensors files")
        with _opened(path) as weights:
            try:
                tensor: torch.Tensor = weights.get_tensor(name)
            except (SafetensorError, ValueError) as error:
                raise ModelLoadError(f"{path}: weight {name} cannot be read: {error}") from error
            return tensor

    return Checkpoint(
        source=str(folder),
        config=parse_config(raw, str(folder / "config.json")),
        text=folder_text(folder),
        names=frozenset(where),
        read=read,
        rope_pairs_adjacent=False,
    )


def _weight_map(folder: Path) -> Iterator[tuple[str, Path]]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise ModelLoadError(f"{index}: weight_map is missing")
        paths = sorted({folder / str(name) for name in files.values()})
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        why = f"; {others[0]} is a pickle, which is never loaded" if others else ""
        raise ModelLoadError(f"{folder}: no safetensors file{why}")
    for path in paths:
        with _opened(path) as weights:
            for name in weights.keys():  # noqa: SIM118 # not a mapping
                yield name, path


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: damaged or truncated: {error}") from error


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a config.json.

    Raises:
        ModelLoadError: something in it is missing, malformed, or not supported; it is named.
    """
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelLoadError(
            f"{source}: architecture {architecture} is not supported by the torch runner"
            f" (supported: {', '.join(FAMILIES)})"
        )
    _refuse_what_differs(raw, source)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        default_head_dim = family.head_dim or hidden // heads
        config = ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or default_head_dim),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_scaling=_rope_scaling(_rope(raw), source),
            sliding_window=family.sliding_window(raw),
        )
    except KeyError as error:
        raise ModelLoadError(f"{source}: {error.args[0]} is missing") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"{source}: {error}") from error
    return check_config(config, source)


def _refuse_what_differs(raw: Mapping[str, Any], source: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"{source}: hidden_act {activation} is not supported")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(
            f"{source}: quantization {method} is not supported by the torch runner; use GGUF or --runner vllm"
        )
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelLoadError(f"{source}: partial_rotary_factor is not supported")


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says on RoPE: `rope_parameters` since transformers 5, else `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_scaling must be an object, got {rope!r}")
    return rope


def _rope_scaling(rope: Mapping[str, Any], source: str) -> Llama3Rope | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind != "llama3":
        raise ModelLoadError(f"{source}: rope type {kind} is not supported (supported: default, llama3)")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
