"""A model on this machine's disk, and the JSON files that come with it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_svc.errors import ModelLoadError


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelLoadError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value
