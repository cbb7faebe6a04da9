"""The routes: paths, what metrics call them, and whose API they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Route:
    """A path and the method of `Gateway` that answers there, after which metrics call it."""

    path: str
    handler: str
    answer: str
    """Kind of answer in the OpenAPI document."""
    method: str = "POST"
    """Only those with POST read a body."""
    anthropic: bool = False
    """Errors are in Anthropic's shape, not in OpenAI's."""


ROUTES: Final = (
    Route("/v1/completions", "completions", "completion"),
    Route("/v1/chat/completions", "chat_completions", "chat"),
    Route("/v1/responses", "responses", "response"),
    Route("/v1/messages", "messages", "message", anthropic=True),
    Route("/v1/messages/count_tokens", "count_tokens", "token_count", anthropic=True),
    Route("/v1/embeddings", "embeddings", "embeddings"),
    Route("/v1/models", "models", "models", "GET"),
    Route("/v1/models/{name:path}", "model", "model", "GET"),
    Route("/tokenize", "tokenize", "tokenize"),
    Route("/detokenize", "detokenize", "detokenize"),
    Route("/health", "health", "health", "GET"),
    Route("/version", "version", "version", "GET"),
    Route("/metrics", "exposition", "metrics", "GET"),
)
WITH_BODY: Final[Mapping[str, Route]] = {route.path: route for route in ROUTES if route.method == "POST"}
