"""The models that workers describe, and what the shell needs of each."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from octavo.protocol.convert import geometry_from_proto
from octavo.protocol.convert_sampling import sampling_from_proto
from octavo.sampling import NEUTRAL, SamplingParams
from octavo.v1 import worker_pb2
from tokenizers import Tokenizer

from scheduler_svc.errors import ServiceError
from scheduler_svc.text.chat import output_formats
from scheduler_svc.text.detokenizer import Detokenizer, WindowDetokenizer
from scheduler_svc.text.tokenization import TextSpec, special_tokens
from scheduler_svc.text.tokenizer_pool import TokenizerPool

TOKENIZER_FILE: Final = "tokenizer.json"
_SOON_S: Final = 0.5
"""When to ask again while workers that were never here may yet come."""


class IncompatibleWorker(Exception):
    """A worker cannot serve beside the others of its model, or at all; the message says why."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model and who serves it. Stays when its last worker goes: its requests wait for the next."""

    id: str
    revision: str
    kv_dtype: str
    block_size: int
    vocab_size: int
    text_key: str
    """Names its tokenizer in the tokenizer pool."""
    has_chat_template: bool
    eos_token_ids: frozenset[int]
    defaults: SamplingParams
    """Complete but for seed, max_tokens and logprobs."""
    detokenizer: Detokenizer
    tool_format: str = ""
    """How its output has calls of tools, and thoughts; empty where that is not known."""
    reasoning_format: str = ""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""
    context: dict[str, int] = field(default_factory=dict)
    """Tokens of the longest sequence, by worker; the last known of those that are away."""
    claims: set[str] = field(default_factory=set)
    """Workers that are attached or about to be."""
    workers: set[str] = field(default_factory=set)
    """Workers that are attached."""
    adapters_of: dict[str, frozenset[str]] = field(default_factory=dict)
    """LoRA adapters by worker; like `context`, also of those that are away."""
    constrains: bool = False
    """Whether its workers can hold output to a constraint; what the last one said."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use; the first is its id."""
        return (self.id, *self.aliases)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that some worker can hold."""
        present = [tokens for worker, tokens in self.context.items() if worker in self.workers]
        return max(present or self.context.values())

    @property
    def adapters(self) -> frozenset[str]:
        """LoRA adapters that some worker has, or had when it was last here: requests wait for its return."""
        return frozenset().union(*self.adapters_of.values())

    def claims_adapter(self, name: str) -> bool:
        """Return whether a worker that is attached, or about to be, has this LoRA adapter."""
        return any(name in self.adapters_of[worker] for worker in self.claims)

    def resolve(self, sampling: SamplingParams) -> SamplingParams:
        """Fill what a request leaves open from the model's defaults; seed and max_tokens may stay open."""
        return sampling.completed_by(self.defaults)


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """What a request asks for: a model, and the LoRA adapter to apply to it, if any."""

    model: ServedModel
    adapter: str | None = None


class ModelRegistry:
    """All models, by id. No two have a name in common."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool
        self._models: dict[str, ServedModel] = {}
        self._lock = asyncio.Lock()
        self.fleet_is_tried: Callable[[], bool] = lambda: True
        """Whether every worker there is has been asked once what it serves."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def peek(self, name: str) -> ServedModel | None:
        """Return the model that a request means, or None where `find` would raise."""
        known = self._models.get(name)
        if known is not None:
            return known
        try:
            return self.find(name).model
        except ServiceError:
            return None

    def find(self, name: str) -> ModelTarget:
        """Return what a request means by the name of a model or of an adapter.

        Raises:
            ServiceError: there is none, or the request has to choose.
        """
        if not self._models:
            # While some may yet come it is worth to ask again; later nobody knows of any.
            retry_after_s = None if self.fleet_is_tried() else _SOON_S
            raise ServiceError("NO_WORKER", "no worker has connected yet", retry_after_s=retry_after_s)
        if name:
            named = self._models.get(name) or next((model for model in self if name in model.aliases), None)
            if named is not None:
                return ModelTarget(named)
            owners = [model for model in self if name in model.adapters]
            if owners:
                # Two may have it when the workers of one are away: then the other is meant.
                return ModelTarget(max(owners, key=lambda owner: owner.claims_adapter(name)), name)
            if not self.fleet_is_tried():
                raise ServiceError(
                    "NO_WORKER", f"no worker with model {name!r} has connected yet", retry_after_s=_SOON_S
                )
        known = ", ".join(sorted(name for model in self for name in (*model.names, *model.adapters)))
        if name:
            raise ServiceError(
                "UNKNOWN_MODEL",
                f"no model {name!r} here; there is {known}",
                violations=[("model", f"must be one of {known}")],
            )
        if len(self._models) > 1:
            raise ServiceError.invalid(("model", f"must be set: there is {known}"))
        return ModelTarget(next(iter(self._models.values())))

    async def claim(self, description: worker_pb2.WorkerDescription) -> ServedModel:
        """Take note of a worker that is about to be attached, and load its model if that is new.

        Until it is released, no worker that differs from it may serve under the model's name.

        Raises:
            IncompatibleWorker: it has no usable tokenizer, or differs from those that serve the model.
        """
        # One at a time: two workers of a new model must not both load it.
        async with self._lock:
            self._check_names(description)
            known = self._models.get(description.model_id)
            fresh = _identity(description)
            if known is None or (not known.claims and _identity_of(known) != fresh):
                known = self._models[description.model_id] = await self._load(description)
            elif _identity_of(known) != fresh:
                raise IncompatibleWorker(
                    f"it has (revision, kv dtype, block size, vocabulary, tokenizer) {fresh}, "
                    f"the others have {_identity_of(known)}"
                )
            elif not known.claims:
                # It may have been configured anew.
                known.aliases, known.defaults = tuple(description.aliases), _defaults(description)
            elif set(known.aliases) != set(description.aliases):
                raise IncompatibleWorker(
                    f"it serves the model as {_listed(_names(description))}, "
                    f"the others as {_listed(known.names)}"
                )
            self._take_names(known)
            known.context[description.worker_id] = description.max_model_len
            known.adapters_of[description.worker_id] = frozenset(description.adapters)
            known.constrains = description.structured_output
            known.claims.add(description.worker_id)
            return known

    def _check_names(self, description: worker_pb2.WorkerDescription) -> None:
        """Refuse a worker under whose names a request could mean two things."""
        names = _names(description)
        others = [model for model in self if model.id != description.model_id and model.claims]
        for name in description.adapters:
            if name in names or any(name in model.names for model in others):
                raise IncompatibleWorker(f"its adapter {name} has the name of a model")
            if (owner := next((model for model in others if model.claims_adapter(name)), None)) is not None:
                raise IncompatibleWorker(f"model {owner.id} has an adapter {name}, too")
        for name in names:
            if any(model.claims_adapter(name) for model in others):
                raise IncompatibleWorker(f"its model {name} has the name of another model's adapter")
            if (owner := next((model for model in others if name in model.names), None)) is not None:
                raise IncompatibleWorker(
                    f"it serves its model as {_listed(names)}, and {name} is a name of another, which is "
                    f"served as {_listed(owner.names)}; workers of one model must have the same names, the "
                    "first one first"
                )

    def _take_names(self, model: ServedModel) -> None:
        """Let a model have its names alone; others that have one of them have no workers any more."""
        names = frozenset(model.names)
        self._models = {one.id: one for one in self if one is model or one.id not in names}
        for one in self:
            if one is not model:
                one.aliases = tuple(alias for alias in one.aliases if alias not in names)

    def release(self, description: worker_pb2.WorkerDescription) -> None:
        """A worker is not attached any more, or never was."""
        model = self._models.get(description.model_id)
        if model is not None:
            model.claims.discard(description.worker_id)

    async def _load(self, description: worker_pb2.WorkerDescription) -> ServedModel:
        files = {file.name: file.content for file in description.tokenizer_files}
        if TOKENIZER_FILE not in files:
            raise IncompatibleWorker(f"it sends no {TOKENIZER_FILE}")
        template = description.chat_template if description.HasField("chat_template") else None
        adds_bos = description.add_bos_token and description.HasField("bos_token_id")
        spec = TextSpec(
            model=_text_key(description),
            tokenizer_json=files[TOKENIZER_FILE],
            chat_template=template,
            special_tokens=dict(description.special_tokens),
            bos_token_id=description.bos_token_id if adds_bos else None,
            vocab_size=description.vocab_size,
        )
        try:
            detokenizer: Detokenizer | None = await self._pool.load(spec)
        except ServiceError as error:
            raise IncompatibleWorker(error.message) from None
        if detokenizer is None:
            detokenizer = await asyncio.to_thread(_window_detokenizer, spec.tokenizer_json)
        tool_format, reasoning_format = output_formats(template) if template is not None else ("", "")
        return ServedModel(
            id=description.model_id,
            revision=description.revision,
            kv_dtype=description.kv_dtype,
            block_size=geometry_from_proto(description.geometry).block_size,
            vocab_size=description.vocab_size,
            text_key=spec.model,
            has_chat_template=template is not None,
            eos_token_ids=frozenset(description.eos_token_ids),
            defaults=_defaults(description),
            detokenizer=detokenizer,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            aliases=tuple(description.aliases),
        )


def _names(description: worker_pb2.WorkerDescription) -> tuple[str, ...]:
    return (description.model_id, *description.aliases)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _defaults(description: worker_pb2.WorkerDescription) -> SamplingParams:
    return sampling_from_proto(description.generation_defaults).completed_by(NEUTRAL)


def _window_detokenizer(tokenizer_json: bytes) -> WindowDetokenizer:
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    return WindowDetokenizer(tokenizer, special_tokens(tokenizer))


def _text_key(description: worker_pb2.WorkerDescription) -> str:
    """Return a name that changes with anything that text handling depends on."""
    digest = hashlib.blake2b(digest_size=8)
    for file in description.tokenizer_files:
        digest.update(file.name.encode() + b"\0" + file.content)
    digest.update(description.chat_template.encode())
    digest.update(repr(sorted(description.special_tokens.items())).encode())
    digest.update(repr((description.add_bos_token, description.bos_token_id)).encode())
    return f"{description.model_id}#{digest.hexdigest()}"


def _identity(description: worker_pb2.WorkerDescription) -> tuple[object, ...]:
    """Return what all workers of one model must share: it decides what a block's key stands for."""
    return (
        description.revision,
        description.kv_dtype,
        description.geometry.block_size,
        description.vocab_size,
        _text_key(description),
    )


def _identity_of(model: ServedModel) -> tuple[object, ...]:
    return (model.revision, model.kv_dtype, model.block_size, model.vocab_size, model.text_key)
