"""Any server that speaks the OpenAI API over HTTP: Octavo's gateway, vLLM, SGLang, TGI and others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import aiohttp
from octavo.service.tls import Tls

from octavo_lab.command import BenchError
from octavo_lab.load.records import Answer, Outcome, TargetRecord
from octavo_lab.load.target import PlannedRequest, Sink
from octavo_lab.load.targets import outcomes

_CHECK_TIMEOUT_S: Final = 10.0
_TOKENIZE_S: Final = 30.0
_WRITTEN: Final = str.maketrans({"\u0120": " ", "\u010a": "\n", "\u2581": " "})
"""How the vocabularies of byte-level BPE and SentencePiece write blanks and newlines down. All else in the
corpus of prompts is ASCII, which they write as it is."""
# Terms of service by the names of the SDK, for which Octavo's gateway has headers; the first are in seconds.
_SECONDS: Final = ("queue_timeout", "ttft_deadline", "deadline")
_PLAIN: Final = ("priority", "keep_head_tokens", "keep_tail_tokens")
_DEGRADE: Final = ("may_trim", "may_shed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiConfig:
    """How to speak to a server."""

    base_url: str
    """With or without `/v1`."""
    api: Literal["completions", "chat"] = "completions"
    model: str = ""
    """Empty: the only one that the server lists."""
    api_key: str = ""
    ignore_eos: bool = True
    """Ask for exactly as many tokens as the dataset says; an extension that vLLM, SGLang and Octavo know."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, by the names of the SDK; what is no term of service is a field of the body."""


class OpenAiTarget:
    """A server with the OpenAI API, driven with streamed (SSE) completions or chats.

    Token counts are the server's own, from the usage that ends each stream.
    """

    def __init__(self, config: OpenAiConfig) -> None:
        self._config = config
        self._chat = config.api == "chat"
        self._base = config.base_url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None
        self.record = TargetRecord(kind=f"openai-{config.api}", address=self._base, model=config.model)
        """What is driven; complete once it is entered."""

    async def __aenter__(self) -> Self:
        """Open a session, and see what is served.

        Raises:
            BenchError: there is no such server, or it does not say which model to use.
        """
        config, tls = self._config, Tls.from_environment()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=60.0, ssl=tls.ssl_context() if tls else True
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=None),
            headers={"Authorization": f"Bearer {config.api_key}"} if config.api_key else {},
        )
        try:
            models = await self._models(self._session)
            name = config.model or (str(models[0]["id"]) if len(models) == 1 else "")
            if not name:
                raise BenchError(f"name the model to drive: {self._base} lists {len(models)}")
        except BaseException:
            await self._session.close()
            raise
        listed = next((model for model in models if model.get("id") == name), {})
        details = {
            "max_model_len": listed.get("max_model_len"),
            "owned_by": listed.get("owned_by"),
            "ignore_eos": config.ignore_eos,
            "options": outcomes.without_key(config.options),
        }
        self.record = replace(self.record, model=name, details=details)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def _models(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S), session.get(f"{self._base}/v1/models") as answer:
                if answer.status != 200:
                    raise BenchError(f"{self._base}/v1/models answers {answer.status}")
                listed = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(f"no OpenAI-compatible server at {self._base}: {error or 'no answer'}") from None
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise BenchError(f"{self._base}/v1/models does not list models")
        return models

    async def pieces(self, text: str) -> list[str]:
        """Split text with the /tokenize of the server, as vLLM and Octavo have it; see `Tokenizer`."""
        assert self._session is not None, "enter the target first"
        url, model = f"{self._base}/tokenize", self.record.model
        body = {"model": model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        try:
            async with asyncio.timeout(_TOKENIZE_S), self._session.post(url, json=body) as answer:
                answer.raise_for_status()
                strings = (await answer.json(content_type=None))["token_strs"]
                return [str(string).translate(_WRITTEN) for string in strings]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise BenchError(
                f"{url} does not say how text is split ({error or 'no answer'}): "
                "name the model's tokenizer.json with --tokenizer"
            ) from error

    def check(self, requests: Sequence[PlannedRequest]) -> None:
        """See, before the run, that messages can be made of all requests.

        Raises:
            BenchError: the value of an option is none, or a prompt is not of a kind that the API takes.
        """
        try:
            for one in requests:
                self._message(one)
        except (TypeError, ValueError) as error:
            raise BenchError(f"an option has a wrong value: {error}") from error

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        """Send a request and follow it; see `LoadTarget`."""
        assert self._session is not None, "enter the target first"
        body, headers = self._message(request)
        url = f"{self._base}/v1/{'chat/completions' if self._chat else 'completions'}"
        reader = StreamReader(sink, chat=self._chat)
        try:
            async with self._session.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    return reader.failed(
                        *outcomes.of_http(answer.status, await answer.text(errors="replace"))
                    )
                async for data in answer.content.iter_any():
                    reader.feed(data)
        except TimeoutError:
            return reader.failed(Outcome.TIMEOUT, "HTTP_TIMEOUT")
        except (aiohttp.ClientError, OSError) as error:
            return reader.failed(Outcome.ERROR, type(error).__name__)
        return reader.answer()

    def _message(self, request: PlannedRequest) -> tuple[dict[str, Any], dict[str, str]]:
        """Return body and headers."""
        if self._chat and request.form == "tokens":
            raise BenchError("a chat takes text or messages, and the dataset has token ids")
        if not self._chat and request.form == "messages":
            raise BenchError(
                "a completion takes text or token ids, and the dataset has conversations: use the chat API"
            )
        prompt: Any = request.prompt
        if self._chat and request.form == "text":
            prompt = [{"role": "user", "content": prompt}]
        headers, fields = _terms({**self._config.options, **request.options})
        body = {
            "model": self.record.model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._config.ignore_eos else {}),
            **fields,
            "messages" if self._chat else "prompt": prompt,
        }
        return body, headers


class StreamReader:
    """Reads one stream of server-sent events as its bytes come: output, and at the end the usage."""

    def __init__(self, sink: Sink, *, chat: bool) -> None:
        self._sink = sink
        self._chat = chat
        self._rest = b""
        self._chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._error: tuple[Outcome, str] | None = None
        self._done = False

    def feed(self, data: bytes) -> None:
        """Take in what came; it may be split anywhere."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            # All else is comments, names of events, and empty lines.
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self._error = outcomes.of_http(None, json.dumps(event))
                return
            choices = event.get("choices")
            if choices and _has_output(choices[0], self._chat):
                self._chunks += 1
                self._sink.chunk()
            self._usage = event.get("usage") or self._usage
        except (ValueError, AttributeError, LookupError, TypeError):
            self._error = (Outcome.ERROR, "BAD_EVENT")

    def answer(self) -> Answer:
        """Return how a stream ended that was read to its end."""
        if self._error is not None:
            return self.failed(*self._error)
        if not self._done:
            return self.failed(Outcome.ERROR, "STREAM_CUT")
        return Answer(
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens"),
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def failed(self, outcome: Outcome, reason: str) -> Answer:
        """Return an end that is not a good one; the output until then was received."""
        return Answer(outcome=outcome, reason=reason, output_tokens=self._chunks)


def _has_output(choice: Mapping[str, Any], chat: bool) -> bool:
    if chat:
        return any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
    # A token may have no text of its own. An event that only says how a request ended has no token.
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _terms(options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers for the terms of service among some options, and the fields for all others."""
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for name, value in options.items():
        header = f"x-octavo-{name.replace('_', '-')}"
        if name in _SECONDS:
            headers[f"{header}-ms"] = str(math.ceil(1000 * value))
        elif name in _PLAIN:
            headers[header] = str(value)
        elif name not in _DEGRADE:
            fields[name] = value
    if allowed := [name for name in _DEGRADE if options.get(name)]:
        headers["x-octavo-degrade"] = ",".join(allowed)
    return headers, fields
