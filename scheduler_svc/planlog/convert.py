"""The core's inputs and settings: records on one side, the plan log's protobuf on the other."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from itertools import chain

from octavo.protocol.convert import (
    geometry_from_proto,
    geometry_to_proto,
    keys_from_proto,
    keys_to_proto,
    plan_to_proto,
    pool_from_proto,
    pool_to_proto,
    pooling_from_proto,
    pooling_to_proto,
    priority_from_proto,
    priority_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from octavo.protocol.steps import Plan
from octavo.v1 import planlog_pb2
from pydantic import TypeAdapter

from scheduler_svc.core import CoreConfig, Effect, EmitTokens, NewRequest, SendPlan, WorkerInfo

_CONFIG = TypeAdapter(CoreConfig)


def config_to_json(config: CoreConfig) -> str:
    """Convert the core's settings."""
    return _CONFIG.dump_json(config).decode()


def config_from_json(text: str) -> CoreConfig:
    """Convert the core's settings; those it has learned since take their defaults.

    Raises:
        ValueError: a value is not what the setting takes.
    """
    return _CONFIG.validate_json(text)


def request_to_proto(request: NewRequest) -> planlog_pb2.SubmitEvent:
    """Convert a request."""
    return planlog_pb2.SubmitEvent(
        request_id=request.request_id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        priority=priority_to_proto(request.priority),
        tenant=request.tenant,
        prompt_keys=keys_to_proto(request.prompt_keys),
        root_key=request.root_key,
        queue_deadline=request.queue_deadline,
        ttft_deadline=request.ttft_deadline,
        deadline=request.deadline,
        resumed=[
            planlog_pb2.ResumedTokens(choice=choice, token_ids=token_ids)
            for choice, token_ids in request.resumed.items()
        ],
        paced=request.paced,
        adapter=request.adapter,
        may_shed=request.may_shed,
        finished_choices=sorted(request.finished_choices),
        order=request.order,
        scored_tokens=request.scored_tokens,
        pooling=pooling_to_proto(request.pooling),
    )


def request_from_proto(message: planlog_pb2.SubmitEvent) -> NewRequest:
    """Convert a request."""
    return NewRequest(
        request_id=message.request_id,
        model=message.model,
        prompt_token_ids=tuple(message.prompt_token_ids[:]),
        sampling=sampling_from_proto(message.sampling),
        priority=priority_from_proto(message.priority),
        tenant=message.tenant,
        prompt_keys=keys_from_proto(message.prompt_keys),
        root_key=message.root_key,
        queue_deadline=message.queue_deadline if message.HasField("queue_deadline") else None,
        ttft_deadline=message.ttft_deadline if message.HasField("ttft_deadline") else None,
        deadline=message.deadline if message.HasField("deadline") else None,
        resumed={entry.choice: tuple(entry.token_ids[:]) for entry in message.resumed},
        paced=message.paced,
        adapter=message.adapter if message.HasField("adapter") else None,
        may_shed=message.may_shed,
        finished_choices=frozenset(message.finished_choices),
        order=message.order,
        scored_tokens=message.scored_tokens,
        pooling=pooling_from_proto(message.pooling if message.HasField("pooling") else None),
    )


def worker_to_proto(info: WorkerInfo) -> planlog_pb2.WorkerUpEvent:
    """Convert a worker's welcome."""
    return planlog_pb2.WorkerUpEvent(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        model=info.model,
        geometry=geometry_to_proto(info.geometry),
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        pool=pool_to_proto(info.pool),
        device_keys=keys_to_proto(info.device_keys),
        host_keys=keys_to_proto(info.host_keys),
        adapters=info.adapters,
        draining=info.draining,
        devices=info.devices,
    )


def worker_from_proto(message: planlog_pb2.WorkerUpEvent) -> WorkerInfo:
    """Convert a worker's welcome."""
    return WorkerInfo(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        model=message.model,
        geometry=geometry_from_proto(message.geometry),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        pool=pool_from_proto(message.pool),
        device_keys=keys_from_proto(message.device_keys),
        host_keys=keys_from_proto(message.host_keys),
        adapters=tuple(message.adapters),
        draining=message.draining,
        devices=message.devices or 1,
    )


def plan_bytes(plan: Plan) -> bytes:
    """Return the canonical serialization of a plan: equal plans give equal bytes."""
    return plan_to_proto(plan).SerializeToString(deterministic=True)


def sent_plans(effects: Iterable[Effect]) -> list[planlog_pb2.SentPlan]:
    """Return the plans among effects, in order."""
    return [
        planlog_pb2.SentPlan(worker_id=effect.worker_id, plan=plan_bytes(effect.plan))
        for effect in effects
        if isinstance(effect, SendPlan)
    ]


def effects_crc(effects: Iterable[Effect]) -> int | None:
    """Return the CRC-32 over all effects but plans, or None when there are none.

    Of tokens it covers request ids, choices, counts and ids; of everything else, all fields.
    """
    crc: int | None = None
    for effect in effects:
        if isinstance(effect, SendPlan):
            continue
        content = _tokens(effect) if isinstance(effect, EmitTokens) else repr(effect).encode()
        crc = zlib.crc32(content, crc or 0)
    return crc


def _tokens(effect: EmitTokens) -> bytes:
    """Return a step's tokens as bytes. On the path of every step, so it makes no object per sequence."""
    request_ids, choices, token_ids, _ = zip(*effect.deltas, strict=True)
    numbers = array("Q", [*choices, *map(len, token_ids), *chain.from_iterable(token_ids)])
    return "\n".join(request_ids).encode() + numbers.tobytes()
