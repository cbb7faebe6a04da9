"""Predicts how long a step takes, from the steps a worker has reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

FORGETTING = 0.995
ENOUGH_STEPS = 8
"""Steps before which the step times of a worker say little."""
_MAX_GAIN = 1e4
_LEAST_STEP_S = 1e-9


class StepTimePredictor(Protocol):
    """What is expected of the steps of a worker."""

    @property
    def num_observations(self) -> int:
        """Steps that this is known from."""

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""

    def predict(
        self, decodes: int, prefill_tokens: int, context_tokens: int, prefill_pairs: float = 0.0
    ) -> float:
        """Return the expected seconds of a step; the pairs are those of `chunk_pairs`."""


def chunk_pairs(tokens: int, start: int) -> float:
    """Return the pairs of query and key of a chunk of a prompt, of which `start` tokens are computed."""
    return tokens * (start + 0.5 * tokens)


class Prices(NamedTuple):
    """What the parts of a step cost, in seconds; none is negative."""

    step_s: float
    """Whatever is in it; never nothing, so that who shares it always has a share."""
    decode_s: float
    prefill_token_s: float
    context_token_s: float
    pair_s: float


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

    def predict(
        self, decodes: int, prefill_tokens: int, context_tokens: int, prefill_pairs: float = 0.0
    ) -> float:
        """Return the expected seconds of a step."""
        return self.factor * self.of.predict(decodes, prefill_tokens, context_tokens, prefill_pairs)


class StepTimeModel:
    """Recursive least squares over (1, decodes, prefill tokens, thousand tokens of context read, pairs).

    The textbook form with exponential forgetting (Ljung, "System Identification", section 11.2).
    The covariance is bounded, so that a long steady load cannot wind it up. The last regressor is the
    attention of the prefill, in millions of pairs: deep in a long prompt it costs more than all the rest.
    """

    def __init__(self) -> None:
        # Before anything is known: a step costs something, and so does a prefill token.
        self._weights = [0.005, 0.0, 1e-5, 0.0, 0.0]
        self._cov = [[1e2 if i == j else 0.0 for j in range(5)] for i in range(5)]
        self.num_observations = 0

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""
        return max(self._weights[2], 0.0)

    def predict(
        self, decodes: int, prefill_tokens: int, context_tokens: int, prefill_pairs: float = 0.0
    ) -> float:
        """Return the expected seconds of a step; at least a tenth of a millisecond."""
        w = self._weights
        seconds = w[0] + w[1] * decodes + w[2] * prefill_tokens + w[3] * context_tokens * 1e-3
        return max(1e-4, seconds + w[4] * prefill_pairs * 1e-6)

    def prices(self) -> Prices:
        """Return what each part of a step costs."""
        step, decode, prefill, context, pairs = self._weights
        return Prices(
            max(_LEAST_STEP_S, step),
            max(0.0, decode),
            max(0.0, prefill),
            context * 1e-3 if context > 0.0 else 0.0,
            pairs * 1e-6 if pairs > 0.0 else 0.0,
        )

    def observe(
        self,
        decodes: int,
        prefill_tokens: int,
        context_tokens: int,
        seconds: float,
        prefill_pairs: float = 0.0,
    ) -> None:
        """Learn from one step."""
        b, c, d, e = decodes, prefill_tokens, context_tokens * 1e-3, prefill_pairs * 1e-6
        w, cov = self._weights, self._cov
        error = seconds - (w[0] + w[1] * b + w[2] * c + w[3] * d + w[4] * e)
        # Unrolled: this runs once per step of each worker.
        projected = [row[0] + row[1] * b + row[2] * c + row[3] * d + row[4] * e for row in cov]
        p0, p1, p2, p3, p4 = projected
        gain = FORGETTING + p0 + p1 * b + p2 * c + p3 * d + p4 * e
        for i, row in enumerate(cov):
            step = projected[i] / gain
            w[i] += step * error
            row[0] = (row[0] - step * p0) / FORGETTING
            row[1] = (row[1] - step * p1) / FORGETTING
            row[2] = (row[2] - step * p2) / FORGETTING
            row[3] = (row[3] - step * p3) / FORGETTING
            row[4] = (row[4] - step * p4) / FORGETTING
        if max(cov[0][0], cov[1][1], cov[2][2], cov[3][3], cov[4][4]) > _MAX_GAIN:
            for row in cov:
                row[:] = [0.5 * value for value in row]
        self.num_observations += 1

    def prefill_tokens_within(self, seconds: float, decodes: int, context_tokens: int, start: int = 0) -> int:
        """Return how many tokens of a prompt, `start` of it computed, fit into a step beside decodes."""
        w = self._weights
        slope = self.per_prefill_token_s + max(w[4], 0.0) * start * 1e-6
        if slope <= 0.0:
            return 2**31
        return max(0, int((seconds - self.predict(decodes, 0, context_tokens)) / slope))
