"""Turns a GGUF file into the folder that vLLM loads, once, in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import io
import shutil
import tempfile
from pathlib import Path
from typing import Final

from worker_svc.errors import ModelLoadError
from worker_svc.models.demo_model import cache_folder
from worker_svc.models.files import ResolvedModel
from worker_svc.models.progress import Progress

_CONVERTING: Final = "converting the GGUF file for vLLM"
_FOLDER: Final = "vllm"


def hf_folder_of(model: ResolvedModel, dtype: str, progress: Progress) -> Path:
    """Return a folder with config.json and safetensors that hold the dequantized weights.

    Processes that ask at the same time wait for one conversion. The tokenizer is not part of it:
    that side of a model is read from the GGUF file.

    Args:
        model: a GGUF file.
        dtype: type of the weights, as PyTorch calls it.
        progress: called with what is being done.

    Raises:
        ModelLoadError: the file is damaged, or of an architecture that transformers does not know.
    """
    target = cache_folder() / _FOLDER / f"{model.model_id}-{model.revision}-{dtype}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _convert(model.path, dtype, target, progress)
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def _convert(source: Path, dtype: str, target: Path, progress: Progress) -> None:
    import torch  # noqa: PLC0415 - a folder that is there needs neither
    import transformers  # noqa: PLC0415

    progress(_CONVERTING, 0.0)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # bars that cannot be turned off otherwise
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=getattr(torch, dtype),
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
    except Exception as error:
        raise ModelLoadError(f"{source}: transformers cannot read it for vLLM: {error}") from error
    progress(_CONVERTING, 0.7)
    scratch = Path(tempfile.mkdtemp(prefix="convert-", dir=target.parent))
    try:
        loaded.save_pretrained(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(_CONVERTING, 1.0)
