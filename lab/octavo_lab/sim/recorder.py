"""What clients saw of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protocol.steps import Priority

from scheduler_svc.core import Effect, EmitTokens, FinishChoice, NewRequest, Reject


@dataclass(slots=True)
class SimResult:
    """One request as its client saw it; times are virtual seconds."""

    request_id: str
    tenant: str
    priority: Priority
    arrival: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None
    """STOP, LENGTH, ... or the reason of the error; that of the last choice."""
    preemptions: int = 0
    recoveries: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, if there was one."""
        return self.first_token_at - self.arrival if self.first_token_at is not None else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens, if there were two."""
        if self.first_token_at is None or self.last_token_at is None or self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def completed(self) -> bool:
        """The request got all that it asked for."""
        return self.outcome in {"STOP", "LENGTH"}


@dataclass(slots=True)
class Recorder:
    """Collects a `SimResult` per request; with `gaps`, every time between two tokens as well."""

    gaps: bool = False
    results: dict[str, SimResult] = field(default_factory=dict)
    token_gaps_s: list[float] = field(default_factory=list)

    def submitted(self, spec: NewRequest, now: float) -> None:
        """A request has been sent."""
        self.results[spec.request_id] = SimResult(
            spec.request_id, spec.tenant, spec.priority, now, len(spec.prompt_token_ids)
        )

    def effects(self, effects: list[Effect], now: float) -> None:
        """Take note of what reached clients."""
        for effect in effects:
            if isinstance(effect, EmitTokens):
                for delta in effect.deltas:
                    result = self.results[delta.request_id]
                    if result.first_token_at is None:
                        result.first_token_at = now
                    elif self.gaps and result.last_token_at is not None:
                        self.token_gaps_s.append(now - result.last_token_at)
                    result.last_token_at = now
                    result.output_tokens += len(delta.token_ids)
            elif isinstance(effect, FinishChoice):
                result = self.results[effect.request_id]
                result.cached_tokens += effect.cached_tokens
                result.preemptions += effect.timings.preemptions
                result.recoveries += effect.timings.recoveries
                if effect.last:
                    result.ended_at = now
                    error = effect.error
                    result.outcome = error.reason.value if error is not None else effect.reason.name
            elif isinstance(effect, Reject):
                result = self.results[effect.request_id]
                result.ended_at = now
                result.outcome = effect.error.reason.value

    @property
    def completed(self) -> list[SimResult]:
        """Requests that got all that they asked for."""
        return [result for result in self.results.values() if result.completed]
