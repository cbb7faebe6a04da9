"""How long a step of a worker takes: the one model of it, for the simulator and for `--runner sim`.

Six coefficients, given in a file or fitted to a table of measurements; docs/simulator.md describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "octavo-step-times/1"
_BUILTIN: Final = Path(__file__).parent / "data" / "step_times_smollm2_135m_2cores.json"
_SMALLEST_PIVOT: Final = 1e-12
"""Of a system whose columns have length one: below it the rows do not tell the coefficients apart."""
_OLDER: Final = {
    "step_s": ("base", 1.0),
    "decode_s": ("per_decode", 1.0),
    "context_token_s": ("per_context_token", 1.0),
    "prefill_token_s": ("per_prefill_token", 1.0),
    "prefill_pair_s": ("per_prefill_token_squared", 0.5),
}
"""Coefficients of the format before: seconds, and pairs of query and key, of which n tokens have n^2 / 2."""

_Point = tuple[Seq[float], float]
"""What a measured step had of each coefficient, and the seconds that it took."""


class StepTimesError(ValueError):
    """A file of step times cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, by what is in it.

    base + per_decode * B + per_context_token * (tokens of context that the B decodes read), and with T
    prefill tokens in it, prefill_base + per_prefill_token * T + per_prefill_token_squared * (sum of
    n^2 + 2 n s over chunks of n tokens that start at s). The last term is attention, whose pairs of query
    and key are half of that sum: a prompt costs the same in one piece or in chunks.
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
        seconds = self.base + self.per_decode * num_decodes + self.per_context_token * context_tokens
        if prefill_tokens:
            seconds += self.prefill_base + self.per_prefill_token * prefill_tokens
            seconds += self.per_prefill_token_squared * prefill_squares
        return seconds

    @classmethod
    def builtin(cls) -> StepTimes:
        """Return those of the demo model, SmolLM2-135M, on two CPU cores."""
        return cls.load(_BUILTIN)

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Read coefficients, or fit them to a table of measured steps.

        Raises:
            StepTimesError: the file is neither.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("format") == FORMAT:
                in_ms = document["coefficients_ms"]
                return cls(**{field.name: 1e-3 * float(in_ms[field.name]) for field in fields(cls)})
            if document and document.keys() <= _OLDER.keys():
                return cls._of_older(document)
            return cls.fit(document)
        except OSError as error:
            raise StepTimesError(f"{path}: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StepTimesError(f"{path}: not a file of step times: {error!r}") from error

    @classmethod
    def _of_older(cls, document: Mapping[str, Any]) -> StepTimes:
        """Read the format before, which knew no `prefill_base`; what is not named is the builtin's."""
        named = {
            name: factor * float(document[older])
            for older, (name, factor) in _OLDER.items()
            if older in document
        }
        return replace(cls.builtin(), prefill_base=0.0, **named)

    @classmethod
    def fit(cls, table: Mapping[str, Any]) -> StepTimes:
        """Fit a table of measured steps: least squares of the relative error, nothing below 0.

        Its rows are `decode` {batch, ctx, ms}, `prefill` {tokens, ms, reqs?, each?} and, if there are any,
        `mixed` {decode, ctx, prefill, ms}.

        Raises:
            KeyError, TypeError, ValueError: it is none, or its rows do not tell the coefficients apart.
        """
        base, prefill_base, *others = _least_squares(list(_points(table)))
        return cls(max(0.0, base), max(-base, prefill_base), *(max(0.0, value) for value in others))


def _points(table: Mapping[str, Any]) -> Iterator[_Point]:
    for row in table["decode"]:
        yield (1, 0, row["batch"], row["batch"] * row["ctx"], 0, 0), 1e-3 * row["ms"]
    for row in table["prefill"]:
        reqs, each = row.get("reqs", 1), row.get("each", row["tokens"])
        yield (1, 1, 0, 0, row["tokens"], reqs * each**2), 1e-3 * row["ms"]
    for row in table.get("mixed", ()):
        decodes, chunk = row["decode"], row["prefill"]
        yield (1, 1, decodes, decodes * row["ctx"], chunk, chunk**2), 1e-3 * row["ms"]


def _least_squares(points: Seq[_Point]) -> list[float]:
    """Solve the normal equations, each point weighted by one over its seconds, by Gauss and Jordan."""
    if not points:
        raise ValueError("no rows")
    weighted = [[amount / seconds for amount in amounts] for amounts, seconds in points]
    columns = list(zip(*weighted, strict=True))
    lengths = [sum(value * value for value in column) ** 0.5 or 1.0 for column in columns]
    scaled = [[value / length for value in column] for column, length in zip(columns, lengths, strict=True)]
    system = [[*(_dot(one, other) for other in scaled), sum(one)] for one in scaled]
    for i in range(len(system)):
        pivot = max(range(i, len(system)), key=lambda k: abs(system[k][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < _SMALLEST_PIVOT:
            raise ValueError("the rows do not tell the coefficients apart")
        system[i] = [value / system[i][i] for value in system[i]]
        for k, row in enumerate(system):
            if k != i:
                system[k] = [a - row[i] * b for a, b in zip(row, system[i], strict=True)]
    return [row[-1] / length for row, length in zip(system, lengths, strict=True)]


def _dot(one: Seq[float], other: Seq[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
