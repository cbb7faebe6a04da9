"""Sampling defaults that come with a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.sampling import OF_MODEL, SCALARS, SamplingParams

from worker_svc.errors import ModelLoadError
from worker_svc.models.demo_model import DEMO_DEFAULTS, DEMO_FILE
from worker_svc.models.files import read_json

GENERATION_CONFIG: Final = "generation_config.json"
_GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Where llama.cpp's converter puts what it finds in a generation_config.json."""
_FLOAT32_DIGITS: Final = 7


def config_defaults(config: Mapping[str, Any], source: str) -> SamplingParams:
    """Return what a generation_config.json says of sampling.

    Raises:
        ModelLoadError: a value is none that could be sampled with.
    """
    # Sampling fields of a config that says greedy are leftovers; transformers ignores them, too.
    names = OF_MODEL if config.get("do_sample") is not False else ("repetition_penalty",)
    return _checked({name: config.get(name) for name in names}, source)


def gguf_defaults(metadata: Mapping[str, Any], path: Path) -> SamplingParams:
    """Return the defaults of a GGUF file: those of a file beside it, else those of its metadata.

    The file beside `NAME.gguf` is `NAME.generation_config.json`, or `generation_config.json` for all files of
    the folder. The demo model's file has neither; its model card stands for them.

    Raises:
        ModelLoadError: the file beside it is damaged, or a value is none that could be sampled with.
    """
    for beside in (path.with_suffix(f".{GENERATION_CONFIG}"), path.with_name(GENERATION_CONFIG)):
        if beside.is_file():
            return config_defaults(read_json(beside), str(beside))
    found = _checked({name: metadata.get(key) for name, key in _GGUF_KEYS.items()}, str(path))
    return DEMO_DEFAULTS if path.name == DEMO_FILE and found == SamplingParams() else found


def _checked(values: Mapping[str, Any], source: str) -> SamplingParams:
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"{source}: {name} must be a number, is {value!r}")
    read: dict[str, Any] = {name: _read(name, value) for name, value in given.items()}
    sampling = SamplingParams(**read)
    if violations := sampling.violations():
        raise ModelLoadError(f"{source}: {'; '.join(f'{name} {problem}' for name, problem in violations)}")
    return sampling


def _read(name: str, value: float) -> float | int:
    if SCALARS[name].kind is int:
        return max(0, int(value))  # -1 keeps all, as 0 does
    return float(f"{value:.{_FLOAT32_DIGITS}g}")
