"""Where and in which number types a model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from worker_svc.errors import ModelLoadError

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Compute:
    """Device and types. Keys and values are kept in the type of the activations."""

    device: torch.device
    weights: torch.dtype
    activations: torch.dtype


def choose_compute(device: str, dtype: str) -> Compute:
    """Return what `auto` stands for on this machine, or what was asked for.

    float16 on a CPU is a way to store weights: products and activations are float32, and only half
    as many bytes move. That is the best type of a CPU that cannot multiply bfloat16 natively.

    Raises:
        ModelLoadError: this machine cannot do that.
    """
    where = _device(device)
    if dtype not in ("auto", *_DTYPES):
        raise ModelLoadError(f"dtype {dtype} is not supported (supported: auto, {', '.join(_DTYPES)})")
    weights = _best_dtype(where) if dtype == "auto" else _DTYPES[dtype]
    if where.type == "cpu" and weights == torch.float16:
        if not has_float16_linear():
            raise ModelLoadError("dtype float16 needs an x86 CPU with AVX2; use float32")
        return Compute(where, weights, torch.float32)
    return Compute(where, weights, weights)


def gpu_properties(device: str) -> tuple[str, int] | None:
    """Return name and bytes of memory of the GPU that `device` stands for, or None where that is the CPU.

    Raises:
        ModelLoadError: this machine has no such device.
    """
    where = _device(device)
    if where.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(where)
    return properties.name, properties.total_memory


def has_float16_linear() -> bool:
    """Return whether FBGEMM multiplies float32 activations by float16 weights on this CPU."""
    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name == "cuda" and not has_cuda:
        raise ModelLoadError("device cuda: this machine, or this build of PyTorch, has no CUDA device")
    if name not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name} is not supported (supported: auto, cpu, cuda)")
    return torch.device(name)


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 # there is no public question
        return torch.bfloat16
    return torch.float16 if has_float16_linear() else torch.float32
