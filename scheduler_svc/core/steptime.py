"""Predicts how long a step takes, from the steps a worker has reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FORGETTING = 0.995
ENOUGH_STEPS = 8
"""Steps before which the step times of a worker say little."""
_MAX_GAIN = 1e4


class StepTimePredictor(Protocol):
    """What is expected of the steps of a worker."""

    @property
    def num_observations(self) -> int:
        """Steps that this is known from."""

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""

    def predict(self, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        """Return the expected seconds of a step."""


@dataclass(frozen=True, slots=True)
class ScaledStepTimes:
    """The step times of another worker, so many times as long."""

    of: StepTimePredictor
    factor: float

    @property
    def num_observations(self) -> int:
        """Steps that this is known from."""
        return self.of.num_observations

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""
        return self.factor * self.of.per_prefill_token_s

    def predict(self, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        """Return the expected seconds of a step."""
        return self.factor * self.of.predict(decodes, prefill_tokens, context_tokens)


class StepTimeModel:
    """Recursive least squares over (1, decodes, prefill tokens, thousand tokens of context read).

    The textbook form with exponential forgetting (Ljung, "System Identification", section 11.2).
    The covariance is bounded, so that a long steady load cannot wind it up.
    """

    def __init__(self) -> None:
        # Before anything is known: a step costs something, and so does a prefill token.
        self._weights = [0.005, 0.0, 1e-5, 0.0]
        self._cov = [[1e2 if i == j else 0.0 for j in range(4)] for i in range(4)]
        self.num_observations = 0

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""
        return max(self._weights[2], 0.0)

    def predict(self, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        """Return the expected seconds of a step; at least a tenth of a millisecond."""
        w = self._weights
        return max(1e-4, w[0] + w[1] * decodes + w[2] * prefill_tokens + w[3] * context_tokens * 1e-3)

    def observe(self, decodes: int, prefill_tokens: int, context_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        b, c, d = decodes, prefill_tokens, context_tokens * 1e-3
        w, cov = self._weights, self._cov
        error = seconds - (w[0] + w[1] * b + w[2] * c + w[3] * d)
        # Unrolled: this runs once per step of each worker.
        projected = [row[0] + row[1] * b + row[2] * c + row[3] * d for row in cov]
        gain = FORGETTING + projected[0] + projected[1] * b + projected[2] * c + projected[3] * d
        p0, p1, p2, p3 = projected
        for i, row in enumerate(cov):
            step = projected[i] / gain
            w[i] += step * error
            row[0] = (row[0] - step * p0) / FORGETTING
            row[1] = (row[1] - step * p1) / FORGETTING
            row[2] = (row[2] - step * p2) / FORGETTING
            row[3] = (row[3] - step * p3) / FORGETTING
        if max(cov[0][0], cov[1][1], cov[2][2], cov[3][3]) > _MAX_GAIN:
            for row in cov:
                row[:] = [0.5 * value for value in row]
        self.num_observations += 1

    def prefill_tokens_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Return how many prefill tokens fit into a step of `seconds` beside these decodes."""
        slope = self.per_prefill_token_s
        if slope <= 0.0:
            return 2**31
        return max(0, int((seconds - self.predict(decodes, 0, context_tokens)) / slope))
