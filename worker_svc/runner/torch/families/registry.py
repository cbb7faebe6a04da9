"""The families that the torch runner serves."""

from __future__ import annotations

from typing import Final

from worker_svc.runner.torch.families.llama import LLAMA
from worker_svc.runner.torch.families.mistral import MISTRAL
from worker_svc.runner.torch.families.olmo2 import OLMO2
from worker_svc.runner.torch.families.qwen2 import QWEN2
from worker_svc.runner.torch.families.qwen3 import QWEN3

MODELS: Final = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OLMO2,
)
FAMILIES: Final = {family.architecture: family for family in MODELS}
GGUF_FAMILIES: Final = {family.gguf: family for family in MODELS if family.gguf is not None}
