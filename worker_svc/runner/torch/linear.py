"""Linear layers whose weights are laid out once, in the form that this device multiplies fastest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.runner.torch.compute import Compute

_FLOAT16_MAX: Final = torch.finfo(torch.float16).max
_TYPICAL_ROWS: Final = 8
"""Rows for which oneDNN picks the layout of a packed weight; a decode step has few."""


class Linear(ABC):
    """y = x W^T + b for x [rows, in] and W [out, in]."""

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
