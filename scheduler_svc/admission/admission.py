"""Admission: the way of a request from its message to the core, for Generate and Session alike.

Nothing is spent on a request that there is no room for. One that there is room for is parsed and
charged to its tenant, its prompt is tokenized and keyed, and the core is given the result.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import structlog
from octavo.keys import Tenant
from octavo.protocol.convert import keys_from_proto
from octavo.protocol.keys import chain, root_key
from octavo.protocol.steps import Priority
from octavo.sampling import SamplingParams
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.load import IncomingRequest, LoadGate, constraint_bytes
from scheduler_svc.config import AccessSection
from scheduler_svc.core.events import NewRequest
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry, ModelTarget, ServedModel
from scheduler_svc.requests.accounts import Accounts, RequestAccount
from scheduler_svc.requests.messages import (
    ChatPrompt,
    GenerateCall,
    ResumedChoice,
    ServiceTerms,
    TextPrompt,
    Violations,
    generate_from_proto,
)
from scheduler_svc.requests.outbox import ClientStream
from scheduler_svc.requests.state import PreparedRequest, RequestState
from scheduler_svc.requests.tenants import TenantState, TextLease
from scheduler_svc.text.thoughts import problem_of_budget, with_thoughts
from scheduler_svc.text.tokenization import (
    NO_EXTRA,
    EncodeChat,
    Encoded,
    EncodeJob,
    EncodeText,
    KeySpec,
    PromptExtra,
    TakeTokens,
)
from scheduler_svc.text.tokenizer_pool import NOBODY, Payer, TokenizerPool
from scheduler_svc.text.trimming import TrimSpec

_log = structlog.get_logger()

_AT_ONCE_BYTES: Final = 32 << 10
"""A larger message is converted by a thread: a schema of so much takes ten milliseconds at worst."""
# One thread: more would only take turns with each other, and with the event loop.
_thread: Final = ThreadPoolExecutor(1, "converting")
# The client ends the call at its gRPC deadline; the scheduler has to end it earlier to be heard.
_DEADLINE_MARGIN_S: Final = 0.5


class Admission:
    """Turns messages into requests of the core, each with an account that ends whatever happens."""

    def __init__(
        self,
        access: Access,
        gate: LoadGate,
        inputs: InputProcessor,
        driver: CoreDriver,
        accounts: Accounts,
    ) -> None:
        self._access = access
        self._tenants = accounts.tenants
        self._gate = gate
        self._inputs = inputs
        self._driver = driver
        self._accounts = accounts
        self._numbers = itertools.count(1)

    def open(self, stream: ClientStream) -> RequestAccount:
        """Account for an arrival."""
        return self._accounts.open(stream.transport)

    def caller(self, api_key: str | None) -> TenantState:
        """Return the books of a call's own tenant, whatever its key allows.

        Raises:
            ServiceError: there is no key, or it is not known.
        """
        return self._tenants.state(self._access.authenticate(api_key, None), self._accounts.clock())

    async def pause_before_refusal(self, tenant: Tenant) -> None:
        """Let a tenant that floods the service with calls over its quota wait for its refusals."""
        now = self._accounts.clock()
        await asyncio.sleep(self._tenants.state(tenant, now).refusals.pause_s(now))

    def no_memory(self) -> ServiceError | None:
        """Return why nothing at all can be taken now, if so."""
        return self._gate.no_memory()

    @asynccontextmanager
    async def text_payer(self, api_key: str | None, size_bytes: int) -> AsyncIterator[Payer]:
        """Yield who pays for tokenizing so much that is no prompt.

        Raises:
            ServiceError: the key is no good, its tenant is over its quota, or there is no memory.
        """
        if (error := self._gate.no_memory()) is not None:
            raise error
        quotas, clock = self.caller(api_key), self._accounts.clock
        try:
            quotas.check_text(size_bytes, clock())
        except ServiceError:
            await self.pause_before_refusal(quotas.tenant)
            raise
        lease = TextLease(quotas, size_bytes, clock)
        try:
            yield Payer(f"text of {quotas.tenant.name}", lease.charge)
        finally:
            lease.end()

    def receive(self, message: pb.GenerateRequest, stream: ClientStream) -> IncomingRequest:
        """Return what can be known of a request at once: whose it is, and about how large."""
        caller: Tenant | ServiceError
        if stream.paced and not message.terms.priority:
            message.terms.priority = common_pb2.PRIORITY_BATCH
        try:
            caller = self._access.authenticate(
                message.api_key if message.HasField("api_key") else stream.api_key
            )
        except ServiceError as error:
            caller = error
        return self._gate.receive(message, stream, caller)

    def refuse_at_once(self, incoming: IncomingRequest) -> ServiceError | None:
        """Account for a request that there is no room for, and return why; None when there is room.

        There is none when its tenant is over a quota, or for the load. One whose key is no good is let
        through, to be told that.
        """
        tenant, stream, now = incoming.caller, incoming.stream, self._accounts.clock()
        if isinstance(tenant, ServiceError):
            return None
        error = self._gate.no_memory()
        if error is None:
            state = self._tenants.state(tenant, now)
            error = state.refusal(incoming.estimate, now)
            if error is not None:
                state.count_refusal(error)
            else:
                error = self._gate.refusal(incoming, now)
        if error is not None:
            priority = incoming.message.terms.priority
            self._accounts.refused(stream.transport, priority, tenant.name, error.reason)
        return error

    async def start(
        self,
        incoming: IncomingRequest,
        account: RequestAccount,
        on_end: Callable[[], None] | None = None,
    ) -> RequestState:
        """Hand a request to the core.

        Raises:
            ServiceError: it is wrong or cannot be taken; the account is closed.
        """
        pending = self._gate.enter(incoming)
        try:
            account.request_id = incoming.message.request_id
            tenant, stream = incoming.tenant, incoming.stream
            account.tenant = tenant.name
            call = await _convert(incoming.message)
            account.request_id = call.request_id
            quotas = self._tenants.state(tenant, account.arrival)
            account.lease = quotas.take(incoming.estimate, account.arrival)
            core_id = f"{call.request_id}#{next(self._numbers)}"
            text = TextLease(quotas, incoming.estimate.text_bytes, self._accounts.clock)
            more_bytes = constraint_bytes(incoming.message)
            try:
                payer = Payer(tenant.name, lambda size_bytes: text.charge(size_bytes + more_bytes))
                prepared = await self._inputs.prepare(call, core_id, incoming, account.arrival, payer)
            finally:
                text.end()
            state = RequestState(prepared, stream.outbox, account)
            await state.resume()
        except ServiceError as error:
            pending.close()
            account.end(error.reason)
            raise
        except Exception:  # noqa: BLE001 - logged
            _log.exception("admission_failed", request_id=account.request_id)
            pending.close()
            account.end("INTERNAL")
            raise ServiceError("INTERNAL", "the scheduler failed to take the request") from None
        except BaseException:
            pending.close()
            account.end("SLOW_CONSUMER" if incoming.stream.outbox.cut else "CANCELLED")
            raise
        trimmed_tokens = prepared.trimmed_tokens
        pending.learn(len(prepared.request.prompt_token_ids) + trimmed_tokens)
        state.on_submit = pending.close
        state.on_end = on_end
        account.admitted(state.request, trimmed_tokens, clamped=prepared.clamped_max_tokens is not None)
        self._driver.submit(state)
        return state


class InputProcessor:
    """Tokenizes requests, fills in defaults and checks what depends on the model."""

    def __init__(
        self, models: ModelRegistry, pool: TokenizerPool, gate: LoadGate, settings: AccessSection
    ) -> None:
        self._models = models
        self._pool = pool
        self._gate = gate
        self._salt_secret = settings.cache_secret.get_secret_value().encode()

    async def prepare(
        self, call: GenerateCall, core_id: str, incoming: IncomingRequest, arrival: float, payer: Payer
    ) -> PreparedRequest:
        """Return the request for the core.

        Args:
            call: the request as its client put it.
            core_id: its name in the core, unique among all streams.
            incoming: what else is known of it.
            arrival: when it came, in monotonic seconds.
            payer: who pays for the tokenizer.

        Raises:
            ServiceError: the model is unknown, or the request does not fit it; fields are named.
        """
        target = self._models.find(call.model)
        model, terms, tenant = target.model, call.terms, incoming.tenant.name
        if call.sampling.structured is not None and not model.constrains:
            raise ServiceError("UNSUPPORTED", f"structured output: the workers of {model.id} have none")
        if call.thinking_token_budget is not None:
            problem = problem_of_budget(model.reasoning_format, constrains=model.constrains)
            if problem is not None:
                raise ServiceError("UNSUPPORTED", f"thinking_token_budget: {problem}")
        keys = KeySpec(self.root_key(target, tenant, terms.cache_salt), model.block_size)
        limits = self._gate.limits(call, model)
        trim = limits.trim if limits is not None else None
        # Read once: it changes with the fleet, also while the prompt is being tokenized.
        context = model.max_model_len
        job, size_bytes = _encode_job(call, model.text_key, context, keys, trim)
        encoded = await self.encode(job, size_bytes, payer)
        prompt = array("I")
        prompt.frombytes(encoded.token_ids)
        resolved = _resolve(call, model, len(prompt), context, encoded.bad_words)
        sampling = _clamp(resolved, limits.max_tokens if limits is not None else None)
        if isinstance(call.prompt, ChatPrompt) and not (encoded.thoughts_over or call.is_silent):
            budget, in_reasoning = call.thinking_token_budget, encoded.in_reasoning
            sampling = with_thoughts(sampling, budget, model.reasoning_format, in_reasoning=in_reasoning)
        prompt_keys = keys_from_proto(encoded.keys)
        wanted = call.sampling.max_tokens or resolved.max_tokens
        lowered = terms.may_trim and sampling.max_tokens != wanted
        request = NewRequest(
            request_id=core_id,
            model=model.id,
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=terms.priority,
            tenant=tenant,
            prompt_keys=prompt_keys,
            root_key=keys.root,
            resumed={choice: resumed.token_ids for choice, resumed in call.resumed.items()},
            finished_choices=call.finished_choices,
            resumed_keys=await _resumed_keys(call.resumed, prompt, prompt_keys, keys),
            paced=incoming.stream.paced and terms.priority is Priority.BATCH,
            adapter=target.adapter,
            may_shed=terms.may_shed,
            order=terms.order,
            scored_tokens=call.scored_tokens,
            pooling=call.pooling,
            queue_deadline=self._queue_deadline(terms, arrival),
            ttft_deadline=_after(arrival, terms.ttft_deadline_s),
            deadline=_deadline(terms, arrival, incoming.stream.rpc_deadline),
        )
        return PreparedRequest(
            call,
            request,
            model.detokenizer,
            model.eos_token_ids,
            trimmed_tokens=encoded.trimmed_tokens,
            clamped_max_tokens=sampling.max_tokens if lowered else None,
            in_reasoning=encoded.in_reasoning,
        )

    async def encode(self, job: EncodeJob, size_bytes: int, payer: Payer = NOBODY) -> Encoded:
        """Return the tokens of an input; raises as `TokenizerPool.encode` does."""
        return await self._pool.encode(job, size_bytes, payer)

    def root_key(self, target: ModelTarget, tenant: str, cache_salt: str) -> bytes:
        """Return the root of a prompt's block keys: what it is shared among.

        The tenant's part is keyed with a secret, so that nobody can compute another tenant's keys; the
        request's own salt narrows it further.
        """
        message = len(tenant.encode()).to_bytes(4, "little") + tenant.encode() + cache_salt.encode()
        salt = hmac.digest(self._salt_secret, message, hashlib.sha256)
        model = target.model
        return root_key(model.revision, target.adapter or "", model.kv_dtype, model.block_size, salt)

    def _queue_deadline(self, terms: ServiceTerms, arrival: float) -> float | None:
        timeout_s = terms.queue_timeout_s
        if timeout_s is None:
            timeout_s = self._gate.queue_timeout_s[terms.priority]
        return _after(arrival, timeout_s)


async def _convert(message: pb.GenerateRequest) -> GenerateCall:
    """Return the request of a message; raises ServiceError for what is wrong with it."""
    if message.ByteSize() <= _AT_ONCE_BYTES:
        return generate_from_proto(message)
    return await asyncio.get_running_loop().run_in_executor(_thread, generate_from_proto, message)


def _encode_job(
    call: GenerateCall, text_key: str, context: int, keys: KeySpec, trim: TrimSpec | None
) -> tuple[EncodeJob, int]:
    """Return what makes tokens of a prompt, and the size of the prompt in bytes."""
    extra = NO_EXTRA
    if call.truncate_to is not None or call.sampling.bad_words:
        room = max(1, context - max(1, call.sampling.max_tokens or 0))
        extra = PromptExtra(room if call.truncate_to == -1 else call.truncate_to, call.sampling.bad_words)
    match call.prompt:
        case TextPrompt(text):
            size_bytes = len(text) if text.isascii() else len(text.encode())
            return EncodeText(text_key, context, text, keys=keys, trim=trim, extra=extra), size_bytes
        case ChatPrompt(packed):
            return EncodeChat(text_key, context, packed, keys, trim=trim, extra=extra), len(packed)
        case _:
            packed = call.prompt.packed
            return TakeTokens(text_key, context, packed, keys, trim, extra), len(packed)


def _deadline(terms: ServiceTerms, arrival: float, rpc_deadline: float | None) -> float | None:
    if terms.deadline_s is not None or rpc_deadline is None:
        return _after(arrival, terms.deadline_s)
    return rpc_deadline - min(_DEADLINE_MARGIN_S, (rpc_deadline - arrival) / 10)


def _after(start: float, delay_s: float | None) -> float | None:
    return start + delay_s if delay_s is not None else None


async def _resumed_keys(
    resumed: Mapping[int, ResumedChoice], prompt: array[int], prompt_keys: tuple[bytes, ...], keys: KeySpec
) -> dict[int, tuple[bytes, ...]]:
    """Return the keys of all full blocks of choices that go on. Others get a turn after each."""
    parent = prompt_keys[-1] if prompt_keys else keys.root
    rest = prompt[len(prompt_keys) * keys.block_size :]
    found: dict[int, tuple[bytes, ...]] = {}
    for choice, had in resumed.items():
        found[choice] = (*prompt_keys, *chain(parent, [*rest, *had.token_ids], keys.block_size))
        await asyncio.sleep(0)
    return found


def _resolve(
    call: GenerateCall,
    model: ServedModel,
    prompt_tokens: int,
    max_model_len: int,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """Return sampling with everything set that has to be; `bad_words` are those of the call, as tokens."""
    violations: Violations = []
    if call.is_silent:
        sampling = _silent(call.sampling)
    else:
        sampling = model.resolve(call.sampling)
        if bad_words:
            together = (*sampling.bad_words_token_ids, *bad_words)
            sampling = replace(sampling, bad_words=(), bad_words_token_ids=together)
            violations += [(f"sampling.{name}", problem) for name, problem in sampling.violations()]
    left = max_model_len - prompt_tokens
    max_tokens = min(sampling.max_tokens, left) if sampling.max_tokens is not None else left
    if call.sampling.max_tokens is not None and call.sampling.max_tokens > left and not call.terms.may_trim:
        context = f"the prompt has {prompt_tokens} tokens and the context holds {max_model_len}"
        problem = f"must be at most {left}: {context}, got {call.sampling.max_tokens}"
        violations.append(("sampling.max_tokens", problem))
    if sampling.min_tokens is not None and sampling.min_tokens > max_tokens:
        violations.append(("sampling.min_tokens", f"must be at most {max_tokens}, got {sampling.min_tokens}"))
    violations += _unknown_tokens(sampling, model.vocab_size)
    clamped = call.accepted_as.max_tokens if call.accepted_as is not None else None
    most = min(max_tokens, clamped) if clamped is not None else max_tokens
    for choice, resumed in call.resumed.items():
        if len(resumed.token_ids) > most:
            violations.append(
                (
                    f"resume[{choice}].token_ids",
                    f"has {len(resumed.token_ids)} tokens, more than max_tokens ({most})",
                )
            )
        elif max(resumed.token_ids) >= model.vocab_size:
            violations.append((f"resume[{choice}].token_ids", f"must be below {model.vocab_size}"))
    if violations:
        raise ServiceError.invalid(*violations)
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
    return replace(sampling, max_tokens=max_tokens, seed=seed)


def _unknown_tokens(sampling: SamplingParams, vocab_size: int) -> Violations:
    named: dict[str, Iterable[int]] = {
        name: getattr(sampling, name)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
    }
    named["bad_words_token_ids"] = itertools.chain.from_iterable(sampling.bad_words_token_ids)
    # The first of a list speaks for all.
    wrong = {name: next((one for one in ids if one >= vocab_size), None) for name, ids in named.items()}
    return [
        (f"sampling.{name}", f"must name tokens below {vocab_size}, got {token_id}")
        for name, token_id in wrong.items()
        if token_id is not None
    ]


def _silent(asked: SamplingParams) -> SamplingParams:
    """Return the sampling of a request whose output nobody sees: one token, which ends it."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        n=asked.n or 1,
        seed=asked.seed,
        prompt_logprobs=asked.prompt_logprobs,
    )


def _clamp(sampling: SamplingParams, most: int | None) -> SamplingParams:
    """Return sampling with max_tokens lowered to `most`, or to min_tokens where that is more."""
    if most is None or sampling.max_tokens is None or sampling.max_tokens <= most:
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, max(1, most, sampling.min_tokens or 0)))
