"""Plans, reports and sampling: records on one side, protobuf on the other, in pairs.

`x_to_proto` takes a record that its owner holds to be right. `x_from_proto` takes what came from the
network and raises `ProtocolError` when it is not what `worker.proto` promises, so that nobody behind
it checks again. Token arrays stay packed: no object is made per token.

What a later version may say is no error of the sender: see "Later versions" in docs/protocol.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

from octavo.protocol.convert_sampling import (
    ProtocolError,
    sampling_from_proto,
    sampling_to_proto,
    structured_from_proto,
    structured_to_proto,
)
from octavo.protocol.scalars import Scalars, given
from octavo.protocol.steps import (
    KEY_BYTES,
    Admit,
    Admitted,
    Finished,
    FinishReason,
    Geometry,
    KeyEvents,
    Plan,
    Pooling,
    PoolReport,
    Priority,
    Refused,
    RefuseReason,
    Report,
    StallReason,
    StepError,
    StepStatus,
    StepTiming,
    TierCopies,
    TokenLogprobs,
)
from octavo.sampling import SamplingParams
from octavo.v1 import common_pb2, worker_pb2

__all__ = [
    "ProtocolError",
    "admit_from_proto",
    "admit_to_proto",
    "finish_reason_to_proto",
    "geometry_from_proto",
    "geometry_to_proto",
    "keys_from_proto",
    "keys_to_proto",
    "leaders_of",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "plan_from_proto",
    "plan_to_proto",
    "pool_from_proto",
    "pool_to_proto",
    "pooling_from_proto",
    "pooling_to_proto",
    "priority_from_proto",
    "priority_to_proto",
    "report_from_proto",
    "report_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "structured_from_proto",
    "structured_to_proto",
]

_E = TypeVar("_E", bound=enum.IntEnum)
_WORTH_SHARING = 64
"""Tokens of a prompt from which on it is not sent again for the next admission of a plan."""
_GEOMETRY = Scalars(Geometry, worker_pb2.Geometry)
_POOL = Scalars(PoolReport, worker_pb2.PoolReport, "copies")
_COPIES = Scalars(TierCopies, worker_pb2.TierCopies)
_TIMING = Scalars(StepTiming, worker_pb2.StepTiming)
_ADMITTED = Scalars(Admitted, worker_pb2.Admitted)


def _member(kind: type[_E], value: int, field: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(field, f"unknown value {value}") from None


def _known(kind: type[_E], value: int, field: str, later: _E) -> _E:
    """Return the member, or `later` for one that only a later version knows."""
    return later if value > max(kind) else _member(kind, value, field)


def _same_length(field: str, values: Seq[object], other: str, others: Seq[object]) -> None:
    if len(values) != len(others):
        raise ProtocolError(field, f"has {len(values)} entries, {other} has {len(others)}")


def _unique(field: str, handles: Seq[int]) -> None:
    if len(set(handles)) != len(handles):
        raise ProtocolError(field, "names a handle twice")
    if 0 in handles:
        raise ProtocolError(field, "a handle is at least 1")


def _text(text: str) -> str:
    """Exception texts may hold lone surrogates, which protobuf refuses."""
    return text.encode("utf-8", "replace").decode()


# Keys


def keys_to_proto(keys: Iterable[bytes]) -> bytes:
    """Concatenate keys."""
    return b"".join(keys)


def keys_from_proto(data: bytes, field: str = "keys") -> tuple[bytes, ...]:
    """Cut concatenated keys apart."""
    if not data:
        return ()
    if len(data) % KEY_BYTES:
        raise ProtocolError(field, f"length {len(data)} is no multiple of {KEY_BYTES}")
    return tuple([data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)])


# Enums that travel further than a report


def priority_to_proto(priority: Priority) -> common_pb2.Priority.ValueType:
    """Convert; the numbers are the same."""
    return common_pb2.Priority.ValueType(priority)


def priority_from_proto(value: int, field: str = "priority") -> Priority:
    """Convert; unspecified is STANDARD."""
    return _member(Priority, value, field) if value else Priority.STANDARD


def pooling_to_proto(pooling: Pooling | None) -> common_pb2.Pooling.ValueType | None:
    """Convert; the numbers are the same."""
    return None if pooling is None else common_pb2.Pooling.ValueType(pooling)


def pooling_from_proto(value: int | None, field: str = "pooling") -> Pooling | None:
    """Convert; unspecified is LAST."""
    return None if value is None else _member(Pooling, value or Pooling.LAST, field)


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """Convert; the numbers are the same."""
    return common_pb2.FinishReason.ValueType(reason)


# Plans


class Leaders(NamedTuple):
    """Earlier admissions of a plan that have what an admission then need not bring."""

    prompt: Admit | None = None
    sampling: Admit | None = None


_NOBODY = Leaders()


def admit_to_proto(admit: Admit, leaders: Leaders = _NOBODY) -> worker_pb2.Admit:
    """Convert one admission; what its leaders have, too, is left out."""
    leader = leaders.prompt
    shared_keys = _num_shared(leader.keys, admit.keys) if leader is not None else 0
    return worker_pb2.Admit(
        handle=admit.handle,
        token_ids=admit.token_ids if leader is None else admit.token_ids[admit.prompt_len :],
        prompt_len=admit.prompt_len,
        sampling=sampling_to_proto(admit.sampling) if leaders.sampling is None else None,
        sampling_of=leaders.sampling.handle if leaders.sampling is not None else None,
        choice=admit.choice,
        keys=keys_to_proto(admit.keys[shared_keys:]),
        prompt_of=leader.handle if leader is not None else None,
        shared_keys=shared_keys,
        reserve_tokens=admit.reserve_tokens,
        hold_after_finish=admit.hold_after_finish,
        priority=priority_to_proto(admit.priority),
        adapter=admit.adapter,
        score_from=admit.score_from,
        pooling=pooling_to_proto(admit.pooling),
    )


def leaders_of(admits: Seq[Admit], *, share_sampling: bool = True) -> list[Leaders]:
    """Return for each admission an earlier one of the same prompt, if it saves something, and sampling.

    The choices of a request come one after the other and have one record of sampling, so only the one
    before is looked at.
    """
    leaders: list[Leaders] = []
    before: Admit | None = None
    for admit in admits:
        prompt = sampling = None
        if before is not None:
            prompt = leaders[-1].prompt or before
            same = prompt.prompt_len == admit.prompt_len >= _WORTH_SHARING
            if not same or prompt.token_ids[: admit.prompt_len] != admit.token_ids[: admit.prompt_len]:
                prompt = None
            if share_sampling and before.sampling is admit.sampling:
                sampling = leaders[-1].sampling or before
        leaders.append(Leaders(prompt, sampling))
        before = admit
    return leaders


def _num_shared(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def admit_from_proto(message: worker_pb2.Admit, before: Mapping[int, Admit] | None = None) -> Admit:
    """Convert one admission; `before` are those before it in its plan, by handle.

    Raises:
        ProtocolError: it is inconsistent, or a sampling value is out of range.
    """
    token_ids = tuple(message.token_ids[:])
    keys = keys_from_proto(message.keys, "admit.keys")
    if message.HasField("prompt_of"):
        leader = (before or {}).get(message.prompt_of)
        if leader is None or leader.prompt_len != message.prompt_len:
            raise ProtocolError("admit.prompt_of", f"{message.prompt_of} has no such prompt")
        if message.shared_keys > len(leader.keys):
            raise ProtocolError("admit.shared_keys", f"must be at most {len(leader.keys)}")
        token_ids = tuple(leader.token_ids[: leader.prompt_len]) + token_ids
        keys = leader.keys[: message.shared_keys] + keys
    if len(set(keys)) != len(keys):
        raise ProtocolError("admit.keys", "names a key twice")
    if not 1 <= message.prompt_len <= len(token_ids):
        problem = f"must be in [1, {len(token_ids)}] (tokens sent), got {message.prompt_len}"
        raise ProtocolError("admit.prompt_len", problem)
    return Admit(
        handle=message.handle,
        token_ids=token_ids,
        prompt_len=message.prompt_len,
        sampling=_admit_sampling(message, before or {}),
        choice=message.choice,
        keys=keys,
        reserve_tokens=given(message, "reserve_tokens"),
        hold_after_finish=message.hold_after_finish,
        priority=priority_from_proto(message.priority, "admit.priority"),
        adapter=given(message, "adapter"),
        score_from=_score_from(message),
        pooling=pooling_from_proto(given(message, "pooling"), "admit.pooling"),
    )


def _score_from(message: worker_pb2.Admit) -> int | None:
    score_from: int | None = given(message, "score_from")
    if score_from == 0:
        raise ProtocolError("admit.score_from", "is at least 1")
    return score_from


def _admit_sampling(message: worker_pb2.Admit, before: Mapping[int, Admit]) -> SamplingParams:
    if message.HasField("sampling_of"):
        leader = before.get(message.sampling_of)
        if leader is None:
            raise ProtocolError("admit.sampling_of", f"{message.sampling_of} is no earlier admission")
        return leader.sampling
    sampling = sampling_from_proto(message.sampling)
    for name, problem in sampling.violations():
        raise ProtocolError(f"admit.sampling.{name}", problem)
    return sampling


def plan_to_proto(plan: Plan, *, share_sampling: bool = True) -> worker_pb2.Plan:
    """Convert a plan; what admissions have in common is sent once."""
    leaders = leaders_of(plan.admit, share_sampling=share_sampling)
    return worker_pb2.Plan(
        step=plan.step,
        admit=[admit_to_proto(admit, of) for admit, of in zip(plan.admit, leaders, strict=True)],
        prefill_handles=[handle for handle, _ in plan.prefill],
        prefill_tokens=[tokens for _, tokens in plan.prefill],
        skip=plan.skip,
        seal=[worker_pb2.Seal(handle=handle, block_index=index, key=key) for handle, index, key in plan.seal],
        release=plan.release,
        resume_after=plan.resume_after,
    )


def plan_from_proto(message: worker_pb2.Plan) -> Plan:
    """Convert a plan.

    Raises:
        ProtocolError: parallel arrays differ in length, a handle is named twice or is 0, admissions
            do not ascend, a key is no key or named twice, or a sampling value is out of range.
    """
    if message.step < 1:
        raise ProtocolError("step", "is at least 1")
    prefill_handles = message.prefill_handles[:]
    prefill_tokens = message.prefill_tokens[:]
    _same_length("prefill_tokens", prefill_tokens, "prefill_handles", prefill_handles)
    _unique("prefill_handles", prefill_handles)
    if 0 in prefill_tokens:
        raise ProtocolError("prefill_tokens", "must be positive")
    known: dict[int, Admit] = {}
    for entry in message.admit:
        known.setdefault(entry.handle, admit_from_proto(entry, known))
    admit = tuple(known.values())
    handles = [entry.handle for entry in message.admit]
    _unique("admit.handle", handles)
    if handles != sorted(handles):
        raise ProtocolError("admit.handle", "must ascend")
    skip, release = tuple(message.skip), tuple(message.release)
    _unique("skip", skip)
    _unique("release", release)
    return Plan(
        step=message.step,
        admit=admit,
        prefill=tuple(zip(prefill_handles, prefill_tokens, strict=True)),
        skip=skip,
        seal=tuple([_seal_from_proto(seal) for seal in message.seal]),
        release=release,
        resume_after=given(message, "resume_after"),
    )


def _seal_from_proto(message: worker_pb2.Seal) -> tuple[int, int, bytes]:
    if len(message.key) != KEY_BYTES:
        raise ProtocolError("seal.key", f"must have {KEY_BYTES} bytes, got {len(message.key)}")
    return message.handle, message.block_index, message.key


# Reports


def geometry_to_proto(geometry: Geometry) -> worker_pb2.Geometry:
    """Convert the shape of a KV memory."""
    return _GEOMETRY.to_proto(geometry)


def geometry_from_proto(message: worker_pb2.Geometry) -> Geometry:
    """Convert the shape of a KV memory; one without blocks is an error."""
    if message.block_size < 1 or message.num_blocks < 1:
        raise ProtocolError("geometry", "block_size and num_blocks are at least 1")
    return _GEOMETRY.from_proto(message)


def pool_to_proto(pool: PoolReport) -> worker_pb2.PoolReport:
    """Convert the state of a pool."""
    return _POOL.to_proto(pool, copies=None if pool.copies is None else _COPIES.to_proto(pool.copies))


def pool_from_proto(message: worker_pb2.PoolReport) -> PoolReport:
    """Convert the state of a pool."""
    return _POOL.from_proto(
        message, copies=_COPIES.from_proto(message.copies) if message.HasField("copies") else None
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Convert the log probabilities of one position."""
    return common_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Convert the log probabilities of one position."""
    top_token_ids, top_logprobs = tuple(message.top_token_ids), tuple(message.top_logprobs)
    _same_length("top_logprobs", top_logprobs, "top_token_ids", top_token_ids)
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top_token_ids, top_logprobs)


def _key_events_to_proto(events: KeyEvents) -> worker_pb2.KeyEvents | None:
    if not (events.stored or events.demoted or events.promoted or events.evicted):
        return None
    return worker_pb2.KeyEvents(
        stored=keys_to_proto(events.stored),
        demoted=keys_to_proto(events.demoted),
        promoted=keys_to_proto(events.promoted),
        evicted=keys_to_proto(events.evicted),
    )


def _key_events_from_proto(message: worker_pb2.KeyEvents) -> KeyEvents:
    return KeyEvents(
        stored=keys_from_proto(message.stored, "key_events.stored"),
        demoted=keys_from_proto(message.demoted, "key_events.demoted"),
        promoted=keys_from_proto(message.promoted, "key_events.promoted"),
        evicted=keys_from_proto(message.evicted, "key_events.evicted"),
    )


def report_to_proto(report: Report) -> worker_pb2.Report:
    """Convert a report."""
    return worker_pb2.Report(
        step=report.step,
        status=worker_pb2.StepStatus.ValueType(report.status),
        token_handles=report.token_handles,
        token_counts=report.token_counts,
        first_positions=report.first_positions,
        token_ids=report.token_ids,
        logprobs=[
            worker_pb2.SequenceLogprobs(handle=handle, tokens=map(logprobs_to_proto, tokens))
            for handle, tokens in report.logprobs.items()
        ],
        finished=[
            worker_pb2.FinishedSequence(
                handle=entry.handle,
                reason=finish_reason_to_proto(entry.reason),
                stop_token_id=entry.stop_token_id,
            )
            for entry in report.finished
        ],
        stalled=[
            worker_pb2.Stalled(handle=handle, reason=worker_pb2.StallReason.ValueType(reason))
            for handle, reason in report.stalled
        ],
        refused=[
            worker_pb2.Refused(
                handle=entry.handle,
                reason=worker_pb2.RefuseReason.ValueType(entry.reason),
                detail=_text(entry.detail),
            )
            for entry in report.refused
        ],
        admitted=map(_ADMITTED.to_proto, report.admitted),
        released=report.released,
        prefilled_handles=[handle for handle, _ in report.prefilled],
        prefilled_tokens=[tokens for _, tokens in report.prefilled],
        pool=pool_to_proto(report.pool),
        key_events=_key_events_to_proto(report.key_events),
        live_count=report.live_count,
        digest=report.digest,
        timing=_TIMING.to_proto(report.timing),
        errors=[
            worker_pb2.StepError(handles=error.handles, kind=error.kind, message=_text(error.message))
            for error in report.errors
        ],
        simulated=report.simulated,
        prompt_logprobs=[
            worker_pb2.SequenceLogprobs(
                handle=handle, first_position=first, tokens=map(logprobs_to_proto, tokens)
            )
            for handle, (first, tokens) in report.prompt_logprobs.items()
        ],
        embeddings=[
            worker_pb2.SequenceEmbedding(handle=handle, values=values)
            for handle, values in report.embeddings.items()
        ],
    )


def report_from_proto(message: worker_pb2.Report) -> Report:
    """Convert a report.

    Enum values of a later version are read as what does least harm; `errors` names those that fail something.

    Raises:
        ProtocolError: parallel arrays differ in length, counts do not add up, or an enum is not set.
    """
    token_handles, token_counts = tuple(message.token_handles[:]), tuple(message.token_counts[:])
    first_positions, token_ids = tuple(message.first_positions[:]), tuple(message.token_ids[:])
    _same_length("first_positions", first_positions, "token_handles", token_handles)
    if token_counts:
        _same_length("token_counts", token_counts, "token_handles", token_handles)
        if sum(token_counts) != len(token_ids):
            raise ProtocolError("token_counts", f"add up to {sum(token_counts)} of {len(token_ids)} tokens")
    else:
        _same_length("token_ids", token_ids, "token_handles", token_handles)
    _same_length("prefilled_tokens", message.prefilled_tokens, "prefilled_handles", message.prefilled_handles)
    return Report(
        step=message.step,
        status=_known(StepStatus, message.status, "status", later=StepStatus.FAILED),
        pool=pool_from_proto(message.pool),
        live_count=message.live_count,
        digest=message.digest,
        token_handles=token_handles,
        token_counts=token_counts,
        first_positions=first_positions,
        token_ids=token_ids,
        logprobs={
            entry.handle: tuple([logprobs_from_proto(tokens) for tokens in entry.tokens])
            for entry in message.logprobs
        },
        prompt_logprobs={
            entry.handle: (
                entry.first_position,
                tuple([logprobs_from_proto(tokens) for tokens in entry.tokens]),
            )
            for entry in message.prompt_logprobs
        },
        embeddings={entry.handle: tuple(entry.values[:]) for entry in message.embeddings},
        finished=tuple([_finished_from_proto(entry) for entry in message.finished]),
        stalled=tuple([_stalled_from_proto(entry) for entry in message.stalled]),
        refused=tuple([_refused_from_proto(entry) for entry in message.refused]),
        admitted=tuple(map(_ADMITTED.from_proto, message.admitted)),
        released=tuple(message.released[:]),
        prefilled=tuple(zip(message.prefilled_handles, message.prefilled_tokens, strict=True)),
        key_events=_key_events_from_proto(message.key_events),
        timing=_TIMING.from_proto(message.timing),
        errors=(
            *[StepError(tuple(error.handles), error.kind, error.message) for error in message.errors],
            *_not_understood(message),
        ),
        simulated=message.simulated,
    )


def _finished_from_proto(message: worker_pb2.FinishedSequence) -> Finished:
    if not message.reason:
        raise ProtocolError("finished.reason", "must be set")
    reason = FinishReason(message.reason) or FinishReason.ERROR
    return Finished(message.handle, reason, given(message, "stop_token_id"))


def _stalled_from_proto(message: worker_pb2.Stalled) -> tuple[int, StallReason]:
    return message.handle, _known(StallReason, message.reason, "stalled.reason", later=StallReason.NO_BLOCK)


def _refused_from_proto(message: worker_pb2.Refused) -> Refused:
    reason = _known(RefuseReason, message.reason, "refused.reason", later=RefuseReason.UNSUPPORTED)
    return Refused(message.handle, reason, message.detail)


def _not_understood(message: worker_pb2.Report) -> Iterator[StepError]:
    """Yield an error for each value of a later version that fails a sequence, or the step."""
    for entry in message.finished:
        if not FinishReason(entry.reason):
            problem = f"it ended for the unknown reason {entry.reason}"
            yield StepError((entry.handle,), "UNKNOWN_VALUE", problem)
    if message.status > max(StepStatus):
        yield StepError((), "UNKNOWN_VALUE", f"the unknown step status {message.status}")
