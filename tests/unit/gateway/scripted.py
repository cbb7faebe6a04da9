"""A client of a service whose model says what a test wants it to say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import httpx
from octavo import AsyncClient
from octavo.errors import OctavoError
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewaySettings
from octavo.protocol.steps import FinishReason
from octavo.types import (
    Accepted,
    ChatMessage,
    Choice,
    Delta,
    GenerateResult,
    ModelInfo,
    Progress,
    Tokenization,
    Usage,
)


@dataclass
class Script:
    """What the model says, and what it was asked."""

    text: str = ""
    tool_format: str = "hermes"
    reasoning_format: str = ""
    in_reasoning: bool = False
    finish_reason: FinishReason = FinishReason.STOP
    stop: str | None = None
    piece_chars: int = 3
    fails_after: int | None = None
    """Pieces, after which the service fails."""
    asked: list[tuple[list[ChatMessage], dict[str, Any]]] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=10, completion_tokens=len(self.pieces), cached_tokens=4)

    @property
    def pieces(self) -> list[str]:
        return [self.text[at : at + self.piece_chars] for at in range(0, len(self.text), self.piece_chars)]

    @property
    def options(self) -> dict[str, Any]:
        return self.asked[-1][1]

    @property
    def choice(self) -> Choice:
        tokens = tuple(range(len(self.pieces)))
        return Choice(0, self.text, tokens, self.finish_reason, self.stop, usage=self.usage)


class ScriptedStream:
    """The script, piece by piece; the end comes with the last."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._numbers = iter(range(max(1, len(script.pieces))))
        self.accepted = Accepted(0, None, 10, 0, 1, in_reasoning=script.in_reasoning)
        self.result = GenerateResult("r", (script.choice,), 1)
        self.prompt_logprobs = self.result.prompt_logprobs

    async def progress(self) -> Progress | None:
        script, number = self._script, next(self._numbers, None)
        if number is None:
            return None
        if number == script.fails_after:
            raise OctavoError("the worker is gone")
        deltas = (Delta(0, script.pieces[number], (number,)),) if script.pieces else ()
        is_last = number >= len(script.pieces) - 1
        return Progress(deltas, (script.choice,) if is_last else ())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class ScriptedClient:
    """Only what a gateway asks."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def models(self, *, api_key: str | None = None) -> list[ModelInfo]:
        del api_key
        script = self.script
        formats = {"tool_format": script.tool_format, "reasoning_format": script.reasoning_format}
        return [ModelInfo("m", "1", 2048, 100, True, (), 1, **formats)]  # type: ignore[arg-type]

    async def chat(self, messages: list[ChatMessage], **options: Any) -> GenerateResult:
        self.script.asked.append((messages, options))
        return GenerateResult("r", (self.script.choice,), 1, in_reasoning=self.script.in_reasoning)

    def chat_stream(self, messages: list[ChatMessage], **options: Any) -> ScriptedStream:
        self.script.asked.append((messages, options))
        return ScriptedStream(self.script)

    async def tokenize_chat(self, messages: list[ChatMessage], **options: Any) -> Tokenization:
        self.script.asked.append((messages, options))
        return Tokenization(tuple(range(10)), (), 2048)


@asynccontextmanager
async def gateway_of(script: Script) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway for the script in this process."""
    app = create_app(GatewaySettings.load({}), cast("AsyncClient", ScriptedClient(script)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway/v1") as http:
        yield http


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, without the marker of its end."""
    for block in answer.text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
