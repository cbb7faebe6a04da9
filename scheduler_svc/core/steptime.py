"""Predicts how long a step takes, from the steps a worker has reported."""

from __future__ import annotations

FORGETTING = 0.995
_MAX_GAIN = 1e4


class StepTimeModel:
    """Recursive least squares over (1, decodes, prefill tokens, thousand tokens of context read).

    The textbook form with exponential forgetting (Ljung, "System Identification", section 11.2).
    The covariance is bounded, so that a long steady load cannot wind it up.
    """

    def __init__(self) -> None:
        self._weights = [0.005, 0.0, 0.0, 0.0]
        self._cov = [[1e2 if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._last_error_s = 0.0
        self.num_observations = 0

    @property
    def per_prefill_token_s(self) -> float:
        """Seconds that one more prefill token costs; never negative."""
        return max(self._weights[2], 0.0)

    @property
    def error_s(self) -> float:
        """Smoothed absolute prediction error."""
        return self._last_error_s

    def predict(self, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        """Return the expected seconds of a step; at least a tenth of a millisecond."""
        w = self._weights
        return max(1e-4, w[0] + w[1] * decodes + w[2] * prefill_tokens + w[3] * context_tokens * 1e-3)

    def observe(self, decodes: int, prefill_tokens: int, context_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        x = (1.0, float(decodes), float(prefill_tokens), context_tokens * 1e-3)
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        self._last_error_s += 0.1 * (abs(error) - self._last_error_s)
        projected = [sum(row[j] * x[j] for j in range(4)) for row in self._cov]
        gain = FORGETTING + sum(x[i] * projected[i] for i in range(4))
        for i in range(4):
            step = projected[i] / gain
            self._weights[i] += step * error
            row = self._cov[i]
            for j in range(4):
                row[j] = (row[j] - step * projected[j]) / FORGETTING
        if max(self._cov[i][i] for i in range(4)) > _MAX_GAIN:
            for row in self._cov:
                for j in range(4):
                    row[j] *= 0.5
        self.num_observations += 1

    def prefill_tokens_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Return how many prefill tokens fit into a step of `seconds` beside these decodes."""
        slope = self.per_prefill_token_s
        if slope <= 0.0:
            return 2**31
        return max(0, int((seconds - self.predict(decodes, 0, context_tokens)) / slope))
