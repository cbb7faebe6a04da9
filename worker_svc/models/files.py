"""A model on this machine's disk."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class ModelFormat(enum.Enum):
    """How a model lies on disk."""

    HF_FOLDER = "hf_folder"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine's disk: a folder with config.json and safetensors, or one GGUF file."""

    model_id: str
    revision: str
    """Equal for equal weights: it roots the content keys of cached KV blocks."""
    format: ModelFormat
    path: Path
