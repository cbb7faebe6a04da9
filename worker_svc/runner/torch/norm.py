"""RMS norm over the last dimension."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name


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
