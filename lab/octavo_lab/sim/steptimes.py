"""How long a simulated step takes: six coefficients, given or fitted to a table of measurements.

The file formats are described in docs/simulator.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "octavo-step-times/1"
_DATA = Path(__file__).parent / "data"


class StepTimesError(ValueError):
    """A file of step times cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one step.

    base + per_decode * B + per_context_token * (tokens of context that the decodes read), and with T
    prefill tokens in it, prefill_base + per_prefill_token * T + per_prefill_token_squared * (sum of
    n^2 + 2 n s over chunks of n tokens that start at s). The last term is attention: a prompt costs
    the same in one piece or in chunks.
    """

    base: float
    prefill_base: float
    per_decode: float
    per_context_token: float
    per_prefill_token: float
    per_prefill_token_squared: float

    def seconds(
        self, num_decodes: int, context_tokens: int, prefill_tokens: int = 0, prefill_squares: int = 0
    ) -> float:
        """Return the time of a step; `prefill_squares` is the sum of n^2 + 2 n s."""
        ms = self.base + self.per_decode * num_decodes + self.per_context_token * context_tokens
        if prefill_tokens:
            ms += self.prefill_base + self.per_prefill_token * prefill_tokens
            ms += self.per_prefill_token_squared * prefill_squares
        return ms * 1e-3

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Read coefficients, or fit them to a table of measured steps.

        Raises:
            StepTimesError: the file is neither.
        """
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StepTimesError(f"{path}: {error}") from error
        try:
            if document.get("format") == FORMAT:
                return cls(**{f.name: float(document["coefficients_ms"][f.name]) for f in fields(cls)})
            return cls.fit(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StepTimesError(f"{path}: not a file of step times: {error!r}") from error

    @classmethod
    def builtin(cls, name: str = "smollm2_135m_2cores") -> StepTimes:
        """Read one of the files that come with the package."""
        return cls.load(_DATA / f"{name}.json")

    @classmethod
    def fit(cls, table: Mapping[str, Any]) -> StepTimes:
        """Fit a table with rows `decode` {batch, ctx, ms} and `prefill` {tokens, ms, reqs?, each?}.

        Least squares of the relative error, decodes and prefills apart, as they were measured.
        """
        decodes = [((1.0, row["batch"], row["batch"] * row["ctx"]), row["ms"]) for row in table["decode"]]
        prefills = []
        for row in table["prefill"]:
            reqs, each = row.get("reqs", 1), row.get("each", row["tokens"])
            prefills.append(((1.0, row["tokens"], reqs * each**2), row["ms"]))
        base, per_decode, per_context = _least_squares(decodes)
        prefill_base, per_token, per_square = _least_squares(prefills)
        return cls(base, prefill_base - base, per_decode, per_context, per_token, per_square)


def _least_squares(rows: Iterable[tuple[Seq[float], float]]) -> list[float]:
    """Solve the normal equations, each row weighted by one over its value."""
    weighted = [([x / y for x in xs], 1.0) for xs, y in rows]
    size = len(weighted[0][0])
    matrix = [
        [sum(xs[i] * xs[j] for xs, _ in weighted) for j in range(size)]
        + [sum(xs[i] * y for xs, y in weighted)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if matrix[i][i] == 0.0:
            raise ValueError("the rows do not tell the coefficients apart")
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
