"""The public service `octavo.v1.Generation`, but for its sessions."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from octavo.service.call_guard import bearer_key
from octavo.service.status import Context, abort
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.admission import Admission
from scheduler_svc.api.convert import model_to_proto
from scheduler_svc.api.parsing import Malformed, accept
from scheduler_svc.api.rpc import answering, rpc_deadline
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry, ServedModel
from scheduler_svc.requests.outbox import ClientStream, GenerateOutbox
from scheduler_svc.text.tokenization import Decode, EncodeChat, EncodeText, Tokenize
from scheduler_svc.text.tokenizer_pool import TokenizerPool

LEVEL_KEY: Final = "octavo-level"
"""Initial metadata of Generate: the degradation level at admission, 0 to 4."""


class GenerationService:
    """Generate, Tokenize, Detokenize and ListModels."""

    def __init__(
        self,
        admission: Admission,
        driver: CoreDriver,
        models: ModelRegistry,
        pool: TokenizerPool,
        max_backlog_bytes: int,
    ) -> None:
        self._admission = admission
        self._driver = driver
        self._models = models
        self._pool = pool
        self._max_backlog_bytes = max_backlog_bytes

    @answering
    async def generate(self, request: pb.GenerateRequest | Malformed, context: Context) -> None:
        """Serve one request; what fails before its first event fails the call."""
        outbox = GenerateOutbox(self._max_backlog_bytes)
        now = time.monotonic()
        api_key = bearer_key(context.invocation_metadata())
        stream = ClientStream(outbox, "generate", rpc_deadline(context, now), api_key)
        if isinstance(request, Malformed):
            self._admission.open(stream).end(request.error.reason)
            raise request.error
        incoming = self._admission.receive(request, stream)
        no_room = self._admission.refuse_at_once(incoming)
        if no_room is not None:
            if no_room.reason == "QUOTA_EXCEEDED":
                await self._admission.pause_before_refusal(incoming.tenant)
            raise no_room
        state = await self._admission.start(incoming, self._admission.open(stream))
        try:
            await self._write(outbox, context)
            self._driver.delivered(state)
        except asyncio.CancelledError:
            if outbox.cut:
                raise ServiceError(
                    "SLOW_CONSUMER", f"more than {self._max_backlog_bytes} bytes of output were not read"
                ) from None
            raise
        finally:
            self._driver.cancel(state)
        if outbox.error is not None:
            await abort(context, outbox.error)

    @staticmethod
    async def _write(outbox: GenerateOutbox, context: Context) -> None:
        await outbox.wait()
        if outbox.level is not None:
            await context.send_initial_metadata(((LEVEL_KEY, str(outbox.level)),))
        while True:
            await outbox.wait()
            ended = outbox.ended
            for event in outbox.take():
                await context.write(event)
            if ended:
                return

    @answering
    async def tokenize(self, request: pb.TokenizeRequest | Malformed, context: Context) -> bytes:
        """Return the tokens of a text or a conversation: a serialized TokenizeResponse."""
        request = accept(request)
        size_bytes = request.ByteSize()
        key = bearer_key(context.invocation_metadata())
        async with self._admission.text_payer(key, size_bytes) as payer:
            model = self._models.find(request.model).model
            return await self._pool.tokenize(_job_of(request, model), size_bytes, payer)

    @answering
    async def detokenize(
        self, request: pb.DetokenizeRequest | Malformed, context: Context
    ) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        request = accept(request)
        packed = pb.TokenIds(ids=request.token_ids).SerializeToString()
        key = bearer_key(context.invocation_metadata())
        async with self._admission.text_payer(key, len(packed)) as payer:
            job = Decode(self._models.find(request.model).model.text_key, packed, request.keep_special_tokens)
            text = await self._pool.decode(job, payer)
        return pb.DetokenizeResponse(text=text)

    @answering
    async def list_models(
        self, request: pb.ListModelsRequest | Malformed, _: Context
    ) -> pb.ListModelsResponse:
        """Return the models that requests may name."""
        accept(request)
        return pb.ListModelsResponse(models=map(model_to_proto, self._models))


def _job_of(request: pb.TokenizeRequest, model: ServedModel) -> Tokenize:
    key, longest = model.text_key, model.max_model_len
    job: EncodeText | EncodeChat
    match request.WhichOneof("input"):
        case "text":
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            job = EncodeText(key, longest, request.text, special)
        case "chat":
            job = EncodeChat(key, longest, request.chat.SerializeToString())
        case None:
            raise ServiceError.invalid(("input", "one of text and chat must be set"))
    return Tokenize(key, job, request.return_pieces)
