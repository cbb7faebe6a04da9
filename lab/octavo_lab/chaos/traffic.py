"""Clients of every kind, each asking one question after the other."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from octavo._sdk import requests
from octavo.aio import AsyncClient
from octavo.errors import OverloadedError

from octavo_lab.chaos import raw
from octavo_lab.chaos.questions import Question, Reply
from octavo_lab.chaos.stack import ChaosStack

PATIENCE_S: Final = 120.0
"""A request without an end for so long has failed."""
CLIENTS: Final = ("sdk", "sdk", "raw", "openai")
"""What streams take turns to be."""
_NUM_SDK_CLIENTS: Final = 5
_AGAIN_S: Final = 0.5
Ask = Callable[[Reply], Awaitable[None]]


class Clients:
    """Streams of requests to one stack, and all that came of them."""

    def __init__(self, stack: ChaosStack, model: str) -> None:
        self.answers: list[Reply] = []
        self._stack = stack
        self._model = model
        sdk = [AsyncClient(stack.endpoints) for _ in range(_NUM_SDK_CLIENTS)]
        self._sdk = itertools.cycle(sdk)
        self._closers: list[Callable[[], Awaitable[None]]] = [client.aclose for client in sdk]
        self._numbers = itertools.count()

    def clients(self, streams: int) -> list[tuple[str, Ask]]:
        """Return who asks on each stream; `openai` only where the package and a gateway are."""
        makers: dict[str, Callable[[], Ask]] = {"sdk": self._of_sdk, "raw": lambda: self._ask_raw}
        try:
            import openai  # noqa: PLC0415 # not a dependency: only where it is installed
        except ModuleNotFoundError:
            openai = None  # type: ignore[assignment]
        if openai is not None and self._stack.gateways:
            makers["openai"] = lambda: self._of_openai(openai)
        kinds = [kind for kind in CLIENTS if kind in makers]
        return [
            (kind, makers[kind]()) for _, kind in zip(range(streams), itertools.cycle(kinds), strict=False)
        ]

    async def aclose(self) -> None:
        """Close all connections."""
        for close in self._closers:
            await close()

    async def stream(self, name: str, ask: Ask, questions: Sequence[Question], over: asyncio.Event) -> None:
        """Ask one question after the other until it is over."""
        rng = random.Random(name)
        while not over.is_set():
            await self.ask(name.partition("-")[0], ask, rng.choice(questions))

    async def ask(self, client: str, ask: Ask, question: Question) -> Reply:
        """Ask a question; whatever happens is in the answer."""
        answer = Reply(question, client=client, request_id=f"chaos-{client}-{next(self._numbers)}")
        answer.clear()
        self.answers.append(answer)
        answer.started = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ask(answer)
        except TimeoutError:
            answer.error = f"no end within {PATIENCE_S:g} s"
        except Exception as error:  # noqa: BLE001 # whatever a client raises is what its user gets
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        return answer

    def _of_sdk(self) -> Ask:
        client = next(self._sdk)

        async def ask(answer: Reply) -> None:
            options: Any = {**answer.question.sampling, "ignore_eos": True}
            while True:
                options["request_id"] = f"{answer.request_id}-{answer.refused}"
                try:
                    async for delta in client.stream(answer.question.prompt, **options):
                        answer.take(delta.choice, delta.token_ids, delta.text)
                except OverloadedError as error:
                    if answer.arrivals:
                        raise
                    answer.refused += 1
                    await asyncio.sleep(error.retry_after_s or _AGAIN_S)
                else:
                    return

        return ask

    async def _ask_raw(self, answer: Reply) -> None:
        options: Any = {**answer.question.sampling, "ignore_eos": True, "request_id": answer.request_id}
        request = requests.text_request(answer.question.prompt, options)
        request.return_token_ids = True
        answer.refused = await raw.generate(self._stack.endpoints.split(","), request, answer.take)

    def _of_openai(self, openai: Any) -> Ask:
        gateways = self._stack.gateways
        clients = [
            openai.AsyncOpenAI(
                base_url=f"http://{one.address}/v1", api_key="any", timeout=PATIENCE_S, max_retries=0
            )
            for one in gateways
        ]
        self._closers += [client.close for client in clients]
        turns = itertools.count(next(self._numbers))

        async def ask(answer: Reply) -> None:
            while True:
                turn, began = next(turns) % len(gateways), time.monotonic()
                try:
                    await self._complete(clients[turn], answer)
                except openai.RateLimitError:
                    answer.refused += 1
                except Exception:
                    # What fails with its gateway is for its reader to ask again, of the other one.
                    if not self._stack.was_away(gateways[turn], began):
                        raise
                    answer.broken += bool(answer.arrivals)
                    answer.clear()
                else:
                    return
                await asyncio.sleep(_AGAIN_S)

        return ask

    async def _complete(self, client: Any, answer: Reply) -> None:
        body = {**answer.question.sampling, "extra_body": {"ignore_eos": True}, "stream": True}
        ended = 0
        async for chunk in await client.completions.create(
            model=self._model, prompt=answer.question.prompt, **body
        ):
            for choice in chunk.choices:
                if choice.text:
                    answer.take(choice.index, (), choice.text)
                ended += choice.finish_reason is not None
        if ended != answer.question.n:
            raise ConnectionError("the stream broke off without a word")
