"""Octavo over gRPC, through its own client: all requests on as many `Session` streams as asked for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, cast

from octavo import AsyncClient
from octavo._sdk.requests import chat_request, text_request
from octavo.errors import AccessDeniedError, InvalidRequestError, OctavoError

from octavo_lab.command import BenchError
from octavo_lab.load.records import Answer, TargetRecord
from octavo_lab.load.target import PlannedRequest, Sink
from octavo_lab.load.targets import outcomes


class OctavoTarget:
    """A scheduler, or several that stand in for each other.

    Args:
        endpoint: as for `octavo.AsyncClient`.
        model: which model, where several are served.
        options: of every request, by the names of `octavo.types.GenerateOptions`; a request's own come first.
        connections: streams among which requests take turns.
        connect_timeout_s: how long to try to connect.
        api_key: as for `octavo.AsyncClient`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str = "",
        options: Mapping[str, Any] | None = None,
        connections: int = 1,
        connect_timeout_s: float = 10.0,
        api_key: str | None = None,
    ) -> None:
        self.record = TargetRecord(kind="octavo", address=endpoint, model=model)
        """What is driven; complete once it is entered."""
        self._options = {"temperature": 0.0, "ignore_eos": True, **(options or {})}
        self._clients = [
            AsyncClient(endpoint, connect_timeout=connect_timeout_s, api_key=api_key)
            for _ in range(connections)
        ]
        self._turns = itertools.cycle(self._clients)

    @property
    def client(self) -> AsyncClient:
        """A client of the service, for calls beside the traffic."""
        return self._clients[0]

    async def __aenter__(self) -> Self:
        """Connect, and see what is served.

        Raises:
            BenchError: the model is not served, or none was named and there are several.
            OctavoError: the service cannot be reached.
        """
        try:
            await self._look()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()

    async def _look(self) -> None:
        served = await self.client.models()
        name = self.record.model or (served[0].id if len(served) == 1 else "")
        # An adapter is named as a model is, and is one that its base model serves.
        models = {name: model for model in served for name in (*model.adapters, model.id)}
        if name not in models:
            there = ", ".join(models) or "none"
            raise BenchError(f"name the model to drive: there are {there}, got {name!r}")
        details = {
            "max_model_len": models[name].max_model_len,
            "options": outcomes.without_key(self._options),
        }
        # The status is for operators; who may only generate can be measured all the same.
        with suppress(AccessDeniedError):
            status = await self.client.status()
            workers = status.workers
            details |= {
                "version": status.version,
                "workers": len(workers),
                "runner": ", ".join(sorted({worker.runner for worker in workers if worker.runner})),
                "max_num_seqs": max((worker.max_num_seqs for worker in workers), default=0),
                "max_num_batched_tokens": max((one.max_num_batched_tokens for one in workers), default=0),
            }
        self.record = replace(self.record, model=name, details=details)

    def check(self, requests: Sequence[PlannedRequest]) -> None:
        """See, before the run, that requests can be made of all options.

        Raises:
            BenchError: an option is unknown, or its value none.
        """
        # Those without options of their own differ in their prompts only.
        for one in [*requests[:1], *(one for one in requests[1:] if one.options)]:
            try:
                make = chat_request if one.form == "messages" else text_request
                make(cast("Any", one.prompt), self._options_of(one))
            except (TypeError, ValueError, InvalidRequestError) as error:
                options = outcomes.without_key({**self._options, **one.options}).items()
                told = ", ".join(f"{name}={value!r}" for name, value in options)
                raise BenchError(f"options {told}: {error}") from error

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request and follow it; see `LoadTarget`."""
        client = next(self._turns)
        start = client.chat_stream if request.form == "messages" else client.stream
        try:
            async with start(cast("Any", request.prompt), **self._options_of(request)) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        sink.chunk()
                result = stream.result
        except OctavoError as error:
            # Of a request that did not end well only its tokens are sure; the service does not bill it.
            received = 0 if error.partial is None else len(error.partial.token_ids)
            return Answer(outcome=outcomes.of_octavo(error), reason=error.reason, output_tokens=received)
        return Answer(
            prompt_tokens=result.usage.prompt_tokens,
            output_tokens=result.usage.completion_tokens,
            cached_tokens=result.usage.cached_tokens,
            queue_s=result.timings.queue_s,
            preemptions=result.timings.preemptions,
        )

    def _options_of(self, request: PlannedRequest) -> Any:
        own = {"model": self.record.model, "max_tokens": request.output_tokens}
        return {**self._options, **own, **request.options}
