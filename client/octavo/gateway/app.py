"""The HTTP application: routes, and what they share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo import __version__
from octavo.aio import AsyncClient, AsyncStream
from octavo.errors import AccessDeniedError, OctavoError
from octavo.gateway import translate
from octavo.gateway.bodies import Bodies
from octavo.gateway.chat_writer import ChatWriter
from octavo.gateway.config import GatewaySettings
from octavo.gateway.dialects import messages_body, responses_body
from octavo.gateway.dialects.messages_body import CountTokensRequest, MessagesRequest
from octavo.gateway.dialects.messages_writer import MessagesWriter
from octavo.gateway.dialects.responses_body import ResponsesRequest
from octavo.gateway.dialects.responses_writer import ResponsesWriter
from octavo.gateway.documents import ERRORS, answers
from octavo.gateway.embedding_writer import EmbeddingWriter
from octavo.gateway.errors import Failure, GatewayError, failure_of, failure_of_validation
from octavo.gateway.formats import Formats
from octavo.gateway.key_check import KeyCheck
from octavo.gateway.metrics import Metrics, Observation
from octavo.gateway.responses import EventResponse, Job, JobResponse, WholeResponse
from octavo.gateway.routes import ROUTES, WITH_BODY
from octavo.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from octavo.gateway.writers import CompletionWriter, Head, Writer
from octavo.parsing.formats import THOUGHTS_AS_TEXT
from octavo.parsing.output import OutputForm
from octavo.protocol.bounds import short
from octavo.service.loop_lag import LoopLag
from octavo.service.memory import MemoryCeiling
from octavo.service.security import client_tls
from octavo.types import ChatMessage, ChatOptions, GenerateOptions, GenerateResult, ModelInfo, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_log = structlog.get_logger()
_MAX_ID: Final = 64
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """A prompt."""

    client: AsyncClient
    prompt: Prompt
    options: GenerateOptions

    def stream(self) -> AsyncStream:
        """Start it."""
        return self.client.stream(self.prompt, **self.options)

    async def whole(self) -> GenerateResult:
        """Return its output."""
        return await self.client.generate(self.prompt, **self.options)


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A conversation."""

    client: AsyncClient
    messages: list[ChatMessage]
    options: ChatOptions

    def stream(self) -> AsyncStream:
        """Start it."""
        return self.client.chat_stream(self.messages, **self.options)

    async def whole(self) -> GenerateResult:
        """Return its output."""
        return await self.client.chat(self.messages, **self.options)


class Gateway:
    """The routes. Holds a client and counters, and nothing of any request."""

    def __init__(self, client: AsyncClient, settings: GatewaySettings) -> None:
        self._client = client
        self._write_timeout_s = settings.server.write_timeout_s
        self._formats = Formats(client)
        self._started_at = int(time.time())
        self.metrics = Metrics()

    # Generation ----------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> JobResponse:
        """Complete prompts."""
        options = translate.completion_options(body, request.headers)
        prompts = translate.prompts(body.prompt)
        head, headers = await self._head("cmpl", body.model, request)
        num_choices = body.n or 1
        key = translate.bearer_key(request.headers)
        texts = [await self._echo(body, prompt, key) for prompt in prompts]
        echoes = [text for text in texts for _ in range(num_choices)]
        asks = [
            CompletionAsk(self._client, prompt, {**options, "request_id": f"{head.id}-{number}"})
            for number, prompt in enumerate(prompts)
        ]
        writer = CompletionWriter(body, head, echoes)
        observation = Observation(self.metrics, "completions")
        job = Job(asks, writer, num_choices, observation, self._write_timeout_s)
        return self._respond(job, body, headers, head)

    async def chat_completions(self, body: ChatRequest, request: Request) -> JobResponse:
        """Answer in a conversation."""
        return await self._converse(body, request, "chatcmpl", partial(ChatWriter, body), {})

    async def responses(self, body: ResponsesRequest, request: Request) -> JobResponse:
        """Answer in a conversation, as OpenAI's newer API has it. Nothing is stored."""
        return await self._converse(
            responses_body.as_chat(body),
            request,
            "resp",
            partial(ResponsesWriter, body),
            responses_body.RENAMED,
        )

    async def messages(self, body: MessagesRequest, request: Request) -> JobResponse:
        """Answer in a conversation, as Anthropic's API has it."""
        chat = messages_body.as_chat(body)
        if chat.thinking_token_budget is not None:
            _, reasoning_format = await self._formats.of(body.model)
            if reasoning_format != THOUGHTS_AS_TEXT:
                # Programs send one to any model.
                chat = chat.model_copy(update={"thinking_token_budget": None})
        return await self._converse(chat, request, "msg", MessagesWriter, messages_body.RENAMED)

    async def _converse(
        self,
        body: ChatRequest,
        request: Request,
        kind: str,
        writer: Callable[[Head, OutputForm], Writer],
        renamed: Mapping[str, str],
    ) -> JobResponse:
        """Answer a conversation in the words of some API."""
        chat = translate.chat_job(body, request.headers)
        head, headers = await self._head(kind, body.model, request)
        form = chat.tools.form(*await self._formats.of(body.model or ""))
        options: ChatOptions = {**chat.options, "request_id": head.id}
        if form.in_special_tokens:
            options["keep_special_tokens"] = True
        asks = [ChatAsk(self._client, chat.messages, options)]
        observation = Observation(self.metrics, request.scope["route"].name)
        job = Job(asks, writer(head, form), body.n or 1, observation, self._write_timeout_s)
        return self._respond(job, body, headers, head, renamed)

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> JobResponse:
        """Return the vectors of texts."""
        options = translate.embedding_options(body, request.headers)
        head, headers = await self._head("embd", body.model, request)
        asks = [
            CompletionAsk(self._client, prompt, {**options, "request_id": f"{head.id}-{number}"})
            for number, prompt in enumerate(translate.prompts(body.input))
        ]
        observation = Observation(self.metrics, "embeddings")
        job = Job(asks, EmbeddingWriter(body, head), 1, observation, self._write_timeout_s)
        job.renamed = {"text": "input", "tokens.ids": "input", "terms.order": "priority"}
        job.fields = {"request_id": head.id, "model": head.model, "stream": False}
        if body.user is not None:
            job.fields["user"] = body.user
        return WholeResponse(job, headers)

    def _respond(
        self,
        job: Job,
        body: CompletionRequest | ChatRequest,
        headers: Mapping[str, str],
        head: Head,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> JobResponse:
        job.renamed = {**translate.renamed(body), **renamed}
        job.fields = {"request_id": head.id, "model": head.model, "stream": bool(body.stream)}
        if body.user is not None:
            job.fields["user"] = body.user
        return EventResponse(job, headers) if body.stream else WholeResponse(job, headers)

    async def _head(self, kind: str, model: str | None, request: Request) -> tuple[Head, dict[str, str]]:
        """Return what the answer begins with, and the headers that all answers have."""
        given = request.headers.get("x-request-id", "")
        known = given if 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable() else ""
        own = secrets.token_hex(12)
        head = Head(f"{kind}-{known}-{own}" if known else f"{kind}-{own}", int(time.time()), model or "")
        if not model:
            models = await self._client.models(api_key=translate.bearer_key(request.headers))
            if len(models) == 1:
                head = Head(head.id, head.created, models[0].id)
        return head, {"x-request-id": known or head.id}

    async def _echo(self, body: CompletionRequest, prompt: Prompt, key: str) -> str:
        """Return what each choice of a prompt begins with."""
        if not body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return await self._text(prompt, body.model, key)

    async def _text(self, token_ids: Sequence[int], model: str | None, key: str) -> str:
        """Return all that tokens stand for, special tokens too, as `vllm serve` does."""
        return await self._client.detokenize(
            token_ids, model=model or "", keep_special_tokens=True, api_key=key
        )

    # The rest ------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """List the models that are served."""
        return JSONResponse({"object": "list", "data": await self._models(request)})

    async def model(self, name: str, request: Request) -> Response:
        """Describe a model."""
        for one in await self._models(request):
            if one["id"] == name:
                return JSONResponse(one)
        raise GatewayError(
            Failure(404, f"no model {short(name)!r} here", "model_not_found", "model", retry=False)
        )

    async def _models(self, request: Request) -> list[dict[str, Any]]:
        """Return what a request may name as its model: each model, then its other names and its adapters."""
        models = await self._client.models(api_key=translate.bearer_key(request.headers))
        return [
            self._model(model, name, parent)
            for model in models
            for name, parent in [
                *((name, None) for name in (model.id, *model.aliases)),
                *((adapter, model.id) for adapter in model.adapters),
            ]
        ]

    def _model(self, model: ModelInfo, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "octavo",
            "root": model.id if parent is None else name,
            "parent": parent,
            "max_model_len": model.max_model_len,
            "revision": model.revision,
            "workers": model.workers,
            "generation_defaults": model.generation_defaults,
        }

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a prompt or a conversation."""
        model, pieces = body.model or "", bool(body.return_token_strs)
        key = translate.bearer_key(request.headers)
        if body.messages is not None:
            found = await self._client.tokenize_chat(
                translate.chat_messages(body.messages),
                model=model,
                pieces=pieces,
                api_key=key,
                **translate.template_options(
                    body.tools, body.chat_template_kwargs, body.add_generation_prompt
                ),
            )
        else:
            found = await self._client.tokenize(
                body.prompt or "",
                model=model,
                add_special_tokens=body.add_special_tokens,
                pieces=pieces,
                api_key=key,
            )
        return JSONResponse(
            {
                "count": len(found.token_ids),
                "max_model_len": found.max_model_len,
                "tokens": found.token_ids,
                "token_strs": found.pieces if pieces else None,
            }
        )

    async def count_tokens(self, body: CountTokensRequest, request: Request) -> Response:
        """Return how many tokens the prompt of a message has."""
        chat = translate.chat_job(messages_body.as_chat(body), request.headers)
        key = translate.bearer_key(request.headers)
        found = await self._client.tokenize_chat(
            chat.messages, model=body.model, api_key=key, **chat.template
        )
        return JSONResponse({"input_tokens": len(found.token_ids)})

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens."""
        key = translate.bearer_key(request.headers)
        return JSONResponse({"prompt": await self._text(body.tokens, body.model, key)})

    async def health(self) -> Response:
        """Say whether requests can be served: 200, or 503."""
        if not await self._client.serving():
            return JSONResponse({"status": "unavailable", "reason": "the service takes no requests"}, 503)
        try:
            # Under the gateway's own key, without which it can forward nothing.
            await self._client.models()
        except AccessDeniedError as error:
            self.metrics.own_key_refused(error.message)
            reason = f"the gateway's own key was refused: {error.message}"
            return JSONResponse({"status": "unavailable", "reason": reason}, 503)
        except OctavoError as error:
            return JSONResponse({"status": "unavailable", "reason": error.message}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """Name the version."""
        return JSONResponse({"version": __version__})

    async def exposition(self) -> Response:
        """Prometheus metrics of this gateway."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def create_app(settings: GatewaySettings, client: AsyncClient | None = None) -> Any:
    """Return the ASGI application. Without a client it makes one at start, and closes it at the end."""
    client = client or AsyncClient(
        settings.scheduler.endpoint,
        api_key=settings.scheduler.own_key(),
        tls=client_tls(settings.server),
        connect_timeout=settings.scheduler.connect_timeout_s,
        reconnect_timeout=settings.scheduler.reconnect_timeout_s,
    )

    gateway = Gateway(client, settings)
    lag = LoopLag(gateway.metrics.registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lag.start()
        yield
        lag.stop()
        await client.aclose()

    app = FastAPI(
        title="Octavo gateway", version=__version__, lifespan=lifespan, redoc_url=None, docs_url="/docs"
    )
    app.include_router(_routes(gateway))
    Refusals(gateway.metrics).install(app)
    ceiling = MemoryCeiling(settings.server.max_rss_bytes)
    return Bodies(app, settings.server, KeyCheck(client), ceiling, gateway.metrics)


def _routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    for route in ROUTES:
        router.add_api_route(
            route.path, getattr(gateway, route.handler), methods=[route.method], **answers(route)
        )
    return router


class Refusals:
    """Answers to what was refused or failed before a job began."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def install(self, app: FastAPI) -> None:
        """Become the application's handlers of exceptions."""
        app.add_exception_handler(RequestValidationError, self.on_validation_error)
        app.add_exception_handler(GatewayError, self.on_gateway_error)
        app.add_exception_handler(OctavoError, self.on_octavo_error)
        app.add_exception_handler(HTTPException, self.on_http_exception)
        app.add_exception_handler(Exception, self.on_bug)

    async def on_validation_error(self, request: Request, error: Exception) -> Response:
        """The body is not what the schema says."""
        assert isinstance(error, RequestValidationError)
        content_type = request.headers.get("content-type", "")
        if request.method == "POST" and "json" not in content_type:
            problem = f"content-type: must be application/json, got {short(content_type) or 'nothing'!r}"
            failure = Failure(415, problem, "unsupported_media_type", "content-type", retry=False)
            return self._answer(request, failure)
        return self._answer(request, failure_of_validation(error.errors()))

    async def on_gateway_error(self, request: Request, error: Exception) -> Response:
        """The gateway refuses it."""
        assert isinstance(error, GatewayError)
        return self._answer(request, error.failure)

    async def on_octavo_error(self, request: Request, error: Exception) -> Response:
        """The service refuses it, or failed."""
        assert isinstance(error, OctavoError)
        return self._answer(request, failure_of(error, {"token_ids": "tokens"}))

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        """There is no such route, or not by this method."""
        assert isinstance(error, HTTPException)
        status, headers = error.status_code, error.headers or {}
        code = _HTTP_CODES.get(status, "invalid_request")
        failure = Failure(status, str(error.detail), code, retry=False, headers=headers)
        return self._answer(request, failure)

    async def on_bug(self, request: Request, error: Exception) -> Response:
        """A fault of ours."""
        _log.error("request_failed", path=request.url.path, exc_info=error)
        return self._answer(request, Failure(500, "the gateway failed", "internal", retry=False))

    def _answer(self, request: Request, failure: Failure) -> Response:
        # The name of a route, not what the client wrote: nobody shall make up labels.
        endpoint = getattr(request.scope.get("route"), "name", "unknown")
        self._metrics.requests.labels(endpoint, str(failure.status)).inc()
        known = WITH_BODY.get(request.scope["path"])
        body = failure.encoded(anthropic=known is not None and known.anthropic)
        return Response(body, failure.status, failure.all_headers(), media_type="application/json")
