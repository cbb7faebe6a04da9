"""Prometheus metrics of the gateway: `octavo_gateway_*`, in base units."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from octavo.service.log_metrics import LogCollector
from octavo.types import Delta, GenerateResult, Usage

_log = structlog.get_logger()
_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_REMIND_S: Final = 60.0


class Metrics:
    """What a gateway counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "octavo_gateway_requests",
            "Answered requests; 499: the client went away",
            ("endpoint", "status"),
            registry=registry,
        )
        self.running = Gauge(
            "octavo_gateway_running_requests", "Requests under way", ("endpoint",), registry=registry
        )
        self.duration = Histogram(
            "octavo_gateway_request_seconds",
            "Time from the body to the end of the answer",
            ("endpoint",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_output = Histogram(
            "octavo_gateway_first_output_seconds",
            "Time from the body to the first output of the service",
            ("endpoint",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.output_tokens = Counter(
            "octavo_gateway_output_tokens", "Tokens passed on", ("endpoint",), registry=registry
        )
        self.slow_clients = Counter(
            "octavo_gateway_slow_clients", "Clients cut off because they did not read", registry=registry
        )
        self.own_key_refusals = Counter(
            "octavo_gateway_own_key_refusals",
            "Times that the scheduler refused the gateway's own key",
            registry=registry,
        )
        self._told_of_key_at = -_REMIND_S
        ProcessCollector(namespace="octavo_gateway", registry=registry)
        GCCollector(registry=registry)
        registry.register(LogCollector())

    def own_key_refused(self, problem: str) -> None:
        """Count it, and say so once a minute: clients can do nothing about it."""
        self.own_key_refusals.inc()
        if (now := time.monotonic()) - self._told_of_key_at >= _REMIND_S:
            self._told_of_key_at = now
            _log.error(
                "own_key_refused", problem=problem, remedy="give the gateway a key with the role forward"
            )

    def render(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)


class Observation:
    """One request as metrics and logs see it."""

    __slots__ = ("_endpoint", "_first_at", "_metrics", "_started_at", "_tokens", "_usages")

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._started_at = time.perf_counter()
        self._first_at: float | None = None
        self._tokens = 0
        self._usages: Sequence[Usage] = ()
        metrics.running.labels(endpoint).inc()

    def output(self, deltas: Sequence[Delta]) -> None:
        """Output has come."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
        for delta in deltas:
            self._tokens += len(delta.token_ids)

    def whole(self, results: Sequence[GenerateResult]) -> None:
        """All output has come at once."""
        self._tokens = sum(len(choice.token_ids) for result in results for choice in result.choices)
        firsts = [choice.timings.ttft_s for result in results for choice in result.choices]
        self._first_at = self._started_at + min(firsts)
        self.used([result.usage for result in results])

    def used(self, usages: Sequence[Usage]) -> None:
        """The request is complete, and its cost is known."""
        self._usages = usages

    def own_key_refused(self, problem: str) -> None:
        """The gateway's own key was refused, not the client's."""
        self._metrics.own_key_refused(problem)

    def slow(self) -> None:
        """The client does not read."""
        self._metrics.slow_clients.inc()

    def end(self, status: int) -> None:
        """The answer is over."""
        metrics, endpoint = self._metrics, self._endpoint
        metrics.running.labels(endpoint).dec()
        metrics.requests.labels(endpoint, str(status)).inc()
        metrics.duration.labels(endpoint).observe(time.perf_counter() - self._started_at)
        metrics.output_tokens.labels(endpoint).inc(self._tokens)
        if self._first_at is not None:
            metrics.first_output.labels(endpoint).observe(self._first_at - self._started_at)

    def fields(self) -> dict[str, object]:
        """Return what a log of the request says. Never holds its text."""
        first_at = self._first_at
        return {
            "endpoint": self._endpoint,
            "prompt_tokens": sum(usage.prompt_tokens for usage in self._usages),
            "trimmed_tokens": sum(usage.trimmed_tokens for usage in self._usages),
            "completion_tokens": self._tokens,
            "first_output_ms": None if first_at is None else _ms(first_at - self._started_at),
            "total_ms": _ms(time.perf_counter() - self._started_at),
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
