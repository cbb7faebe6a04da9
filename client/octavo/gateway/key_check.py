"""Whose key is good: asked of the scheduler before a body is read, and remembered for a moment.

The scheduler refuses a bad key in any case. Asking it first saves the gateway from reading, for whoever has
none, bodies that will be refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from octavo.aio import AsyncClient
from octavo.errors import AccessDeniedError, ErrorInfo, OctavoError
from octavo.gateway.errors import Failure, failure_of
from octavo.keys import may_be_key

_GOOD_S: Final = 10.0
_BAD_S: Final = 2.0
"""A key that was just made is good in a moment."""
_MAX_REMEMBERED: Final = 4096
_MAX_ASKING: Final = 32
"""Questions on their way to the scheduler: who tries keys waits, and keeps it from nothing else."""
_PATIENCE_S: Final = 5.0
_HURRY_S: Final = 0.05
"""For a key that was good: a busy scheduler holds up nobody who has one. A bad one may be good by now."""
NO_KEY: Final = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    refusal: Failure | None
    fresh_until: float


class KeyCheck:
    """Answers from memory, or asks. Where the scheduler wants no keys, every key is good."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Failure | None]] = {}
        self._wanted = False
        """A scheduler has refused somebody for a key."""
        self._places = asyncio.Semaphore(_MAX_ASKING)

    async def refusal(self, key: str) -> Failure | None:
        """Return why requests with this key are refused, None when they are not.

        While the scheduler cannot be asked, what it said last holds.
        """
        without_key = await self._ask(NO_KEY)
        if key == NO_KEY or without_key is None or without_key.status >= 500:
            return without_key
        if not may_be_key(key):
            return _BAD_KEY
        return await self._ask(key)

    async def refusal_to_look(self, key: str, *, figures: bool) -> Failure | None:
        """Return why somebody may not see what is not the scheduler's to tell, None when they may.

        Metrics (`figures`) are for keys that may see the status, the rest is for any key. Where it is not
        known whether keys are wanted, as before a scheduler is reached, everybody may see it.
        """
        without_key = await self._ask(NO_KEY)
        if without_key is None or (without_key.status >= 500 and not self._wanted):
            return None
        if key == NO_KEY or not may_be_key(key):
            return without_key if key == NO_KEY else _BAD_KEY
        return await self._ask(key, figures=figures)

    async def _ask(self, key: str, *, figures: bool = False) -> Failure | None:
        name = hashlib.sha256(f"{figures}:{key}".encode()).digest()
        known = self._answers.get(name)
        if known is not None and self._clock() < known.fresh_until:
            self._answers.move_to_end(name)
            return known.refusal
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = asyncio.create_task(self._ask_scheduler(name, key, figures))
            asked.add_done_callback(lambda _: self._asked.pop(name))
        if known is not None and (known.refusal is None or key == NO_KEY):
            await asyncio.wait({asked}, timeout=_HURRY_S)
            if not asked.done():
                return known.refusal
        return await asyncio.shield(asked)

    async def _ask_scheduler(self, name: bytes, key: str, figures: bool) -> Failure | None:
        refusal: Failure | None = None
        try:
            async with self._places, asyncio.timeout(_PATIENCE_S):
                await (self._client.status if figures else self._client.models)(api_key=key)
        except AccessDeniedError as error:
            refusal = failure_of(error)
            self._wanted = True
        except TimeoutError:
            return self._last_known(name, _NO_ANSWER)
        except OctavoError as error:
            return self._last_known(name, failure_of(error))
        fresh_s = _GOOD_S if refusal is None or key == NO_KEY else _BAD_S
        self._answers[name] = _Answer(refusal, self._clock() + fresh_s)
        self._answers.move_to_end(name)
        while len(self._answers) > _MAX_REMEMBERED:
            self._answers.popitem(last=False)
        return refusal

    def _last_known(self, name: bytes, otherwise: Failure) -> Failure | None:
        known = self._answers.get(name)
        return known.refusal if known is not None else otherwise


_UNKNOWN: Final = ErrorInfo("BAD_API_KEY", "the API key is not known here", 16)
_BAD_KEY: Final = failure_of(AccessDeniedError(_UNKNOWN.message, _UNKNOWN))
_NO_ANSWER: Final = Failure(
    503,
    f"the scheduler did not answer within {_PATIENCE_S:g} s",
    "unavailable",
    retry_after_s=1.0,
    retry=True,
)
