"""Answers of /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

from octavo.gateway.schemas import EmbeddingRequest
from octavo.gateway.writers import Head, WholeWriter, to_json
from octavo.types import GenerateResult


class EmbeddingWriter(WholeWriter):
    """Writes the vectors of the inputs of a request."""

    def __init__(self, request: EmbeddingRequest, head: Head) -> None:
        self._head = head
        self._as_base64 = request.encoding_format == "base64"

    def whole(self, results: Sequence[GenerateResult]) -> bytes:
        """Return the answer that the vectors of all inputs make."""
        tokens = sum(result.usage.prompt_tokens for result in results)
        return to_json(
            {
                "id": self._head.id,
                "object": "list",
                "created": self._head.created,
                "model": self._head.model,
                "data": [
                    {"object": "embedding", "index": index, "embedding": self._vector(result.embedding)}
                    for index, result in enumerate(results)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _vector(self, values: Sequence[float]) -> list[float] | str:
        if not self._as_base64:
            return list(values)
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
