"""Octavo: large language models over gRPC, with one scheduler for every iteration of every GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo.aio import AsyncClient, AsyncStream
    from octavo.client import Client, Stream
    from octavo.errors import (
        AccessDeniedError,
        ClientClosedError,
        DeadlineExceededError,
        FieldViolation,
        InternalError,
        InvalidRequestError,
        NotFoundError,
        OctavoError,
        OverloadedError,
        RequestCancelledError,
        UnavailableError,
        UnknownModelError,
        UnsupportedError,
    )
    from octavo.llm import LLM
    from octavo.protocol.steps import FinishReason, Priority, TokenLogprobs
    from octavo.sampling import SamplingParams, StructuredOutput
    from octavo.service.tls import Tls
    from octavo.status import Status
    from octavo.types import (
        Accepted,
        BatchItem,
        ChatMessage,
        Choice,
        Delta,
        DrainResult,
        EmbeddingResult,
        GenerateResult,
        ModelInfo,
        PinResult,
        Progress,
        Timings,
        Tokenization,
        Usage,
        WorkerAudit,
    )

    __version__: str

__all__ = [
    "LLM",
    "Accepted",
    "AccessDeniedError",
    "AsyncClient",
    "AsyncStream",
    "BatchItem",
    "ChatMessage",
    "Choice",
    "Client",
    "ClientClosedError",
    "DeadlineExceededError",
    "Delta",
    "DrainResult",
    "EmbeddingResult",
    "FieldViolation",
    "FinishReason",
    "GenerateResult",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "NotFoundError",
    "OctavoError",
    "OverloadedError",
    "PinResult",
    "Priority",
    "Progress",
    "RequestCancelledError",
    "SamplingParams",
    "Status",
    "Stream",
    "StructuredOutput",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Tokenization",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedError",
    "Usage",
    "WorkerAudit",
    "__version__",
]

# Loaded on first use: the services import this package too, and their pure parts must not load gRPC.
# Names are looked for in this order, so only the clients themselves get as far as the heavy modules.
_MODULES: Final = (
    "octavo.types",
    "octavo.errors",
    "octavo.sampling",
    "octavo.status",
    "octavo.protocol.steps",
    "octavo.service.tls",
    "octavo.aio",
    "octavo.client",
    "octavo.llm",
)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 # costs more than the rest of this module

        globals()[name] = version("octavo")
        return globals()[name]
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
