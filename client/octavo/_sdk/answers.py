"""Messages of `octavo.v1`, as the types that users get from the clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from octavo.errors import ErrorInfo, FieldViolation
from octavo.keys import QUOTAS, Quotas
from octavo.protocol.scalars import Scalars, given
from octavo.protocol.steps import Priority, TokenLogprobs
from octavo.sampling import OF_MODEL
from octavo.status import (
    HistoryPoint,
    OverloadStatus,
    PinStatus,
    PlanLogStatus,
    PoolStatus,
    QueueStatus,
    Rates,
    Status,
    TenantStatus,
    TenantUsage,
    UsagePeriod,
    UsageReport,
    WorkerStatus,
)
from octavo.types import (
    Accepted,
    ModelInfo,
    Timings,
    Usage,
    WorkerAudit,
)
from octavo.v1 import common_pb2, operations_pb2
from octavo.v1 import generation_pb2 as pb

_POOL: Final = Scalars(PoolStatus, operations_pb2.PoolStatus)
_TENANT: Final = Scalars(TenantStatus, operations_pb2.TenantStatus, "quotas")


def error_info(message: common_pb2.Error) -> ErrorInfo:
    """Return what an error event says."""
    return ErrorInfo(
        reason=message.reason,
        message=message.message,
        code=message.code,
        retry_after_s=message.retry_delay_ms / 1000 if message.HasField("retry_delay_ms") else None,
        violations=tuple(FieldViolation(one.field, one.description) for one in message.violations),
        metadata=dict(message.metadata),
    )


def accepted(message: pb.Accepted) -> Accepted:
    """Convert."""
    waits = message.HasField("estimated_wait_ms")
    return Accepted(
        queue_position=message.queue_position,
        estimated_wait_s=message.estimated_wait_ms / 1000 if waits else None,
        prompt_tokens=message.prompt_tokens,
        level=message.level,
        seed=message.seed,
        trimmed_tokens=message.trimmed_tokens,
        clamped_max_tokens=given(message, "clamped_max_tokens"),
        in_reasoning=message.in_reasoning,
    )


def logprobs(messages: Iterable[common_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Convert the log probabilities of some positions."""
    return [
        TokenLogprobs(
            one.token_id,
            one.logprob,
            one.rank,
            tuple(one.top_token_ids),
            tuple(one.top_logprobs),
            one.token_bytes,
            tuple(one.top_token_bytes),
        )
        for one in messages
    ]


def usage(message: common_pb2.Usage) -> Usage:
    """Convert."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        trimmed_tokens=message.trimmed_tokens,
        clamped_max_tokens=given(message, "clamped_max_tokens"),
    )


def timings(message: common_pb2.Timings) -> Timings:
    """Convert."""
    return Timings(
        queue_s=message.queue_ms / 1000,
        ttft_s=message.ttft_ms / 1000,
        tpot_s=message.tpot_ms / 1000,
        total_s=message.total_ms / 1000,
        preemptions=message.preemptions,
        recoveries=message.recoveries,
    )


def model_info(message: pb.Model) -> ModelInfo:
    """Convert."""
    return ModelInfo(
        id=message.id,
        revision=message.revision,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        adapters=tuple(message.adapters),
        workers=message.workers,
        generation_defaults=_defaults(message.generation_defaults),
        aliases=tuple(message.aliases),
        tool_format=message.tool_format,
        reasoning_format=message.reasoning_format,
    )


def _defaults(message: common_pb2.SamplingParams) -> dict[str, float]:
    """Return what is set, as somebody wrote it: 0.2 travels as a float32, which is 0.200000003."""
    values = {name: given(message, name) for name in OF_MODEL}
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }


def status(message: operations_pb2.Status) -> Status:
    """Convert."""
    return Status(
        scheduler_id=message.scheduler_id,
        version=message.version,
        uptime_s=message.uptime_s,
        level=message.level,
        draining=message.draining,
        queues=tuple(
            QueueStatus(
                one.model,
                _queue_priority(one.priority),
                one.waiting,
                one.waiting_tokens,
                one.oldest_wait_ms / 1000,
            )
            for one in message.queues
        ),
        workers=tuple(_worker(one) for one in message.workers),
        outcomes=dict(message.outcomes),
        arrivals=message.arrivals,
        live_requests=message.live_requests,
        rates=_rates(message.rates),
        history=tuple(
            HistoryPoint(
                one.uptime_s, one.level, one.live_requests, one.waiting, one.running, _rates(one.rates)
            )
            for one in message.history
        ),
        tenants=tuple(_tenant(one) for one in message.tenants),
        overload=tuple(_overload(one) for one in message.overload),
        key_file_problem=given(message, "key_file_problem"),
        log_lines_dropped=message.log_lines_dropped,
        plan_log=_plan_log(message.plan_log) if message.HasField("plan_log") else None,
        rss_bytes=message.rss_bytes,
        max_rss_bytes=message.max_rss_bytes,
        pins=tuple(PinStatus(one.name, one.model, one.blocks, tuple(one.workers)) for one in message.pins),
        models=tuple(model_info(one) for one in message.models),
        rank=message.rank,
        endpoint=message.endpoint,
        standby=given(message, "standby"),
        idle_device_s=message.idle_device_s,
        unassigned_device_s=message.unassigned_device_s,
    )


def usage_report(message: operations_pb2.GetUsageResponse) -> UsageReport:
    """Convert."""
    return UsageReport(tuple(map(_usage_period, message.minutes)), given(message, "price_per_gpu_hour"))


def _usage_period(message: operations_pb2.UsageMinute) -> UsagePeriod:
    tenants = (
        TenantUsage(one.tenant, one.requests, one.prompt_tokens, one.output_tokens, one.device_s)
        for one in message.tenants
    )
    return UsagePeriod(
        message.from_unix_ms / 1000,
        message.until_unix_ms / 1000,
        tuple(tenants),
        message.idle_device_s,
        message.unassigned_device_s,
    )


def _plan_log(message: operations_pb2.PlanLogStatus) -> PlanLogStatus:
    return PlanLogStatus(message.path, message.entries_missed, given(message, "problem"))


def _queue_priority(value: int) -> Priority | None:
    try:
        return Priority(value or Priority.STANDARD)
    except ValueError:
        return None


def audit(message: operations_pb2.WorkerAudit) -> WorkerAudit:
    """Convert."""
    return WorkerAudit(
        worker_id=message.worker_id,
        violation=given(message, "violation"),
        problem=given(message, "problem"),
        blocks=message.blocks,
        check_s=message.check_ms / 1000,
    )


def _rates(message: operations_pb2.Rates) -> Rates:
    priced = message.HasField("cost_per_1k_tokens")
    return Rates(
        requests_per_s=message.requests_per_s,
        prompt_tokens_per_s=message.prompt_tokens_per_s,
        output_tokens_per_s=message.output_tokens_per_s,
        ttft_p50_s=message.ttft_p50_ms / 1000,
        ttft_p99_s=message.ttft_p99_ms / 1000,
        queue_p50_s=message.queue_p50_ms / 1000,
        queue_p99_s=message.queue_p99_ms / 1000,
        cost_per_1k_tokens=message.cost_per_1k_tokens if priced else None,
        itl_p50_s=message.itl_p50_ms / 1000,
        itl_p99_s=message.itl_p99_ms / 1000,
        refused_per_s=message.refused_per_s,
    )


def _overload(message: operations_pb2.OverloadStatus) -> OverloadStatus:
    wait_ms, ttft_ms = given(message, "predicted_wait_ms"), given(message, "predicted_ttft_ms")
    return OverloadStatus(
        model=message.model,
        level=message.level,
        half_open=message.half_open,
        backlog=message.backlog,
        backlog_interactive=message.backlog_interactive,
        wait=message.wait,
        wait_interactive=message.wait_interactive,
        blocks=message.blocks,
        misses=message.misses,
        stalled_s=message.stalled_ms / 1000,
        predicted_wait_s=wait_ms / 1000 if wait_ms is not None else None,
        predicted_ttft_s=ttft_ms / 1000 if ttft_ms is not None else None,
        trim_prompt_tokens=given(message, "trim_prompt_tokens"),
        trim_max_tokens=given(message, "trim_max_tokens"),
    )


def _tenant(message: operations_pb2.TenantStatus) -> TenantStatus:
    quotas = Quotas(**{name: given(message.quotas, name) for name in QUOTAS})
    return _TENANT.from_proto(message, quotas=quotas)


def _worker(message: operations_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=message.worker_id,
        address=message.address,
        model=message.model,
        state=message.state,
        running=message.running,
        pool=_POOL.from_proto(message.pool),
        step_s=message.step_ms / 1000,
        bubble_share=message.bubble_share,
        steps=message.steps,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        runner=message.runner,
        devices=message.devices,
        limits_reason=message.limits_reason,
        held_by=message.held_by,
        held_by_endpoint=message.held_by_endpoint,
    )
