"""The parts that a block is made of: linear layers, RMS norm, rotary position embedding.

The weights of a linear layer are laid out once, in the form that this device multiplies fastest. Rotary
embedding works over adjacent pairs, as a product of complex numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.config import Llama3Rope, ModelConfig

_FLOAT16_MAX: Final = torch.finfo(torch.float16).max
_TYPICAL_ROWS: Final = 8
"""Rows for which oneDNN picks the layout of a packed weight; a decode step has few."""


class Linear(ABC):
    """y = x W^T + b for x [rows, in] and W [out, in]."""

    library: ClassVar[str] = "PyTorch"
    """Whose kernel multiplies."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return y, [rows, out]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + y. May overwrite `residual`."""
        return residual.add_(self(x))


class _Dense(Linear):
    """A plain weight: CUDA, and CPUs without a packed kernel for its type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class _OneDnn(Linear):
    """A weight in oneDNN's blocked layout."""

    library = "oneDNN"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)  # noqa: SLF001
        self._bias = bias
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 # no public packed linear

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self._multiply.binary(x, residual, self._weight, self._bias, "add")
        return y


class _Float16(Linear):
    """A float16 weight in FBGEMM's layout, for float32 activations."""

    library = "FBGEMM"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._packed)
        return y


def make_linear(weight: Tensor, bias: Tensor | None, compute: Compute) -> Linear:
    """Lay out `weight` [out, in] and `bias` [out] for `compute`; the originals may be dropped."""
    if compute.device.type == "cpu":
        if compute.weights == torch.float16 and weight.abs().max() <= _FLOAT16_MAX:
            return _Float16(weight.float(), None if bias is None else bias.float())
        weight = weight.to(compute.activations)
        bias = None if bias is None else bias.to(compute.activations)
        if _onednn_packs(compute.activations):
            return _OneDnn(weight, bias)
        return _Dense(weight, bias)
    return _Dense(
        weight.to(compute.device, compute.weights),
        None if bias is None else bias.to(compute.device, compute.weights),
    )


def _onednn_packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch has no type here
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 # there is no public question
    return dtype == torch.float32


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` broadcasts over the last dimension of x; its last dimension is the one to normalize."""
        self._eps = eps
        self._size = weight.shape[-1]
        self._weight = weight
        # PyTorch's CPU kernel is a dozen operations. With the factor sqrt(size) taken into the
        # weight, the divisor is the hypotenuse of |x| and sqrt(size * eps), and four will do.
        self._scaled = weight.float() * math.sqrt(self._size)
        self._leg = torch.tensor(math.sqrt(self._size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x, in its type."""
        if x.device.type != "cpu":
            return F.rms_norm(x, (self._size,), None, self._eps) * self._weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, torch.hypot(length, self._leg)).mul_(self._scaled).to(x.dtype)


def rotations(config: ModelConfig, length: int, factors: Tensor | None) -> Tensor:
    """Return e^(i * position * frequency), complex64 [length, head_dim / 2].

    `factors` [head_dim / 2] divide the frequencies, as GGUF files state Llama 3's scaling.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors.float()
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Rotate the pairs of `heads` [tokens, heads, head_dim] in place by `turns` [tokens, 1, head_dim / 2]."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def adjacent_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows from halves (i, i + head_dim / 2) to pairs (2i, 2i + 1), head by head.

    Queries and keys in one order give the same scores as both in the other.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _stretch(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)
