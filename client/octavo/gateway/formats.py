"""Which formats models have for calls and thoughts: asked of the scheduler, and remembered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from octavo.aio import AsyncClient

_FRESH_S: Final = 10.0
_NONE: Final = ("", "")


class Formats:
    """Answers from memory; asks at most once at a time."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: Mapping[str, tuple[str, str]] = {}
        self._fresh_until = float("-inf")
        self._asked: asyncio.Task[None] | None = None

    async def of(self, model: str) -> tuple[str, str]:
        """Return the formats of tools and of reasoning of a model, named as requests name it.

        Raises:
            OctavoError: the scheduler cannot be asked, and was not before.
        """
        if self._clock() >= self._fresh_until:
            if self._asked is None:
                self._asked = asyncio.create_task(self._ask())
                self._asked.add_done_callback(self._answered)
            await asyncio.shield(self._asked)
        return self._known.get(model, _NONE)

    def _answered(self, _: asyncio.Task[None]) -> None:
        self._asked = None

    async def _ask(self) -> None:
        # Under the gateway's own key: what a model's format is, is no secret of anybody's.
        models = await self._client.models()
        self._known = {
            name: (model.tool_format, model.reasoning_format)
            for model in models
            for name in (model.id, *model.aliases, *model.adapters)
        }
        if len(models) == 1:
            self._known = {**self._known, "": self._known[models[0].id]}
        self._fresh_until = self._clock() + _FRESH_S
