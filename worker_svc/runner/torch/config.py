"""The shape of a Llama-like model."""

from __future__ import annotations

from dataclasses import dataclass

from worker_svc.errors import ModelLoadError


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
