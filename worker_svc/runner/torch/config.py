"""The shape of a Llama-family model, read from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from worker_svc.errors import ModelLoadError

ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DEFAULT_HEAD_DIM: Final = {"Qwen3ForCausalLM": 128}
"""What transformers takes when config.json leaves head_dim out, where that is not hidden / heads."""
_DEFAULT_WINDOW: Final = {"MistralForCausalLM": 4096}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the weights of one model look like and how they are to be used."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: Llama3Rope | None = None
    sliding_window: int | None = None
    """Every layer sees this many tokens at most, the current one included."""

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


def parse_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a config.json.

    Raises:
        ModelLoadError: something in it is missing, malformed, or not supported; it is named.
    """
    architecture = str((raw.get("architectures") or ["none"])[0])
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{source}: architecture {architecture} is not supported by the torch runner"
            f" (supported: {', '.join(ARCHITECTURES)})"
        )
    _refuse_what_differs(raw, source)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        default_head_dim = _DEFAULT_HEAD_DIM.get(architecture, hidden // heads)
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
            sliding_window=_sliding_window(raw, architecture, source),
        )
    except KeyError as error:
        raise ModelLoadError(f"{source}: {error.args[0]} is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source}: {error}") from error
    return check_config(config, source)


def check_config(config: ModelConfig, source: str) -> ModelConfig:
    """Return `config` if its numbers can belong to a model.

    Raises:
        ModelLoadError: they cannot.
    """
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if getattr(config, name) < 1:
            raise ModelLoadError(f"{source}: {name} must be positive, got {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{source}: {config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ModelLoadError(f"{source}: head_dim must be even, got {config.head_dim}")
    return config


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


def _sliding_window(raw: Mapping[str, Any], architecture: str, source: str) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window", _DEFAULT_WINDOW.get(architecture))
    if window is None:
        return None
    kinds = set(raw.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or (
        architecture.startswith("Qwen") and raw.get("max_window_layers", 0)
    ):
        raise ModelLoadError(f"{source}: sliding_window in some layers only is not supported")
    return int(window)
