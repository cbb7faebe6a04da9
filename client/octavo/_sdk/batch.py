"""What the two faces of the client share of a batch: which prompts are on their way, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from octavo._sdk import requests
from octavo._sdk.call import Call
from octavo._sdk.core import Core
from octavo.errors import InvalidRequestError, OctavoError
from octavo.types import BatchItem, GenerateOptions, GenerateResult, Prompt

Outcome = GenerateResult | OctavoError
_WINDOW: Final = 1024
"""Prompts that are taken from their iterable ahead of their outcomes."""


class Batch:
    """A batch under way. Used by one thread, which is the one that the iterable runs on.

    `on_end` gets the index of a prompt that has ended; it may run on another thread.

    Raises:
        InvalidRequestError: the options cannot be those of more than one request.
    """

    def __init__(
        self,
        core: Core,
        prompts: Iterable[Prompt | BatchItem],
        options: GenerateOptions,
        on_end: Callable[[int], None],
    ) -> None:
        if options.get("request_id"):
            problem = "names one request; for those of a batch, give it in the options of each BatchItem"
            raise InvalidRequestError.of_fields(("request_id", problem))
        self._core = core
        self._options: GenerateOptions = {"priority": "batch", **options}
        self._rest = enumerate(prompts)
        self._exhausted = False
        self._on_end = on_end
        self._begun: dict[int, Call | InvalidRequestError] = {}

    @property
    def under_way(self) -> bool:
        """Whether there are prompts whose outcome was not taken."""
        return bool(self._begun)

    @property
    def calls(self) -> list[Call]:
        """The requests whose outcome was not taken."""
        return [call for call in self._begun.values() if isinstance(call, Call)]

    def may_pull(self) -> bool:
        """Return whether there is a prompt to take, as far as is known, and room for it."""
        return not self._exhausted and len(self._begun) < _WINDOW

    def pull(self) -> Call | None:
        """Take the next prompt; return the request to submit for it, if it makes one."""
        taken = next(self._rest, None)
        if taken is None:
            self._exhausted = True
            return None
        index, prompt = taken
        try:
            request = self._core.prepare(requests.batch_request(prompt, self._options))
        except InvalidRequestError as error:
            self._begun[index] = error
            self._on_end(index)
            return None
        call = self._begun[index] = Call(request, partial(self._on_end, index))
        return call

    def take(self, index: int) -> tuple[int, Outcome]:
        """Return the outcome of a prompt that has ended."""
        call = self._begun.pop(index)
        if isinstance(call, InvalidRequestError):
            return index, call
        return index, call.error if call.error is not None else call.result()
