"""Octavo: large language models over gRPC, with one scheduler for every iteration of every GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo.aio import AsyncClient as AsyncClient
    from octavo.aio import AsyncStream as AsyncStream
    from octavo.client import Client as Client
    from octavo.client import Stream as Stream
    from octavo.errors import (
        AccessDeniedError as AccessDeniedError,
    )
    from octavo.errors import (
        ClientClosedError as ClientClosedError,
    )
    from octavo.errors import (
        DeadlineExceededError as DeadlineExceededError,
    )
    from octavo.errors import (
        FieldViolation as FieldViolation,
    )
    from octavo.errors import (
        InternalError as InternalError,
    )
    from octavo.errors import (
        InvalidRequestError as InvalidRequestError,
    )
    from octavo.errors import (
        OctavoError as OctavoError,
    )
    from octavo.errors import (
        OverloadedError as OverloadedError,
    )
    from octavo.errors import (
        RequestCancelledError as RequestCancelledError,
    )
    from octavo.errors import (
        UnavailableError as UnavailableError,
    )
    from octavo.errors import (
        UnknownModelError as UnknownModelError,
    )
    from octavo.errors import (
        UnsupportedError as UnsupportedError,
    )
    from octavo.protocol.steps import (
        FinishReason as FinishReason,
    )
    from octavo.protocol.steps import (
        Priority as Priority,
    )
    from octavo.protocol.steps import (
        TokenLogprobs as TokenLogprobs,
    )
    from octavo.sampling import SamplingParams as SamplingParams
    from octavo.sampling import StructuredOutput as StructuredOutput
    from octavo.status import Status as Status
    from octavo.types import (
        Accepted as Accepted,
    )
    from octavo.types import (
        ChatMessage as ChatMessage,
    )
    from octavo.types import (
        Choice as Choice,
    )
    from octavo.types import (
        Delta as Delta,
    )
    from octavo.types import (
        DrainResult as DrainResult,
    )
    from octavo.types import (
        GenerateResult as GenerateResult,
    )
    from octavo.types import (
        ModelInfo as ModelInfo,
    )
    from octavo.types import (
        Timings as Timings,
    )
    from octavo.types import (
        Tokenization as Tokenization,
    )
    from octavo.types import (
        Usage as Usage,
    )

# Loaded on first use: the services import this package too, and their pure parts must not load gRPC.
_PUBLIC: Final = {
    "octavo.aio": ("AsyncClient", "AsyncStream"),
    "octavo.client": ("Client", "Stream"),
    "octavo.errors": (
        "AccessDeniedError",
        "ClientClosedError",
        "DeadlineExceededError",
        "FieldViolation",
        "InternalError",
        "InvalidRequestError",
        "OctavoError",
        "OverloadedError",
        "RequestCancelledError",
        "UnavailableError",
        "UnknownModelError",
        "UnsupportedError",
    ),
    "octavo.protocol.steps": ("FinishReason", "Priority", "TokenLogprobs"),
    "octavo.sampling": ("SamplingParams", "StructuredOutput"),
    "octavo.status": ("Status",),
    "octavo.types": (
        "Accepted",
        "ChatMessage",
        "Choice",
        "Delta",
        "DrainResult",
        "GenerateResult",
        "ModelInfo",
        "Timings",
        "Tokenization",
        "Usage",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604 # names of a table, loaded on first use


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 # costs more than the rest of this module

        value: object = version("octavo")
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
