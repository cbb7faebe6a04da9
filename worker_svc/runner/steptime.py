"""How long a step takes, as a linear function of what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from worker_svc.errors import InvalidSettings


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes."""

    num_decodes: int = 0
    num_prefill_tokens: int = 0
    decode_context_tokens: int = 0
    """Tokens of context that the decodes read."""
    prefill_pairs: float = 0.0
    """(query, key) pairs of the prefill chunks."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step and per unit of each part of its load.

    The default is SmolLM2-135M in bfloat16 on two CPU cores: least squares over the 33 points of a
    profile from batch 1 to 64, context 64 to 2048 and prefill 16 to 2048; every point within 8%.
    """

    step_s: float = 8.09e-3
    decode_s: float = 4.14e-4
    prefill_token_s: float = 2.69e-4
    context_token_s: float = 1.43e-6
    prefill_pair_s: float = 1.78e-7

    def predict(self, load: StepLoad) -> float:
        """Return the seconds that a step takes."""
        return (
            self.step_s
            + self.decode_s * load.num_decodes
            + self.prefill_token_s * load.num_prefill_tokens
            + self.context_token_s * load.decode_context_tokens
            + self.prefill_pair_s * load.prefill_pairs
        )


def read_profile(path: Path) -> StepTimes:
    """Return the step times of a JSON file.

    It holds either the coefficients by name, or measured points: `decode` (batch, ctx, ms), `prefill`
    (tokens, ms, and reqs x each when several prompts) and `mixed` (decode, ctx, prefill, ms).

    Raises:
        InvalidSettings: the file cannot be read, or holds neither.
    """
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(StepTimes)]
        if set(profile) <= set(names):
            return StepTimes(**{name: float(value) for name, value in profile.items()})
        return _fit(list(_points(profile)))
    except OSError as error:
        raise InvalidSettings(f"sim_profile {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSettings(f"sim_profile {path}: not a profile of step times ({error!r})") from None


def _points(profile: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[StepLoad, float]]:
    for point in profile["decode"]:
        batch = point["batch"]
        yield StepLoad(num_decodes=batch, decode_context_tokens=batch * point["ctx"]), point["ms"] * 1e-3
    for point in profile["prefill"]:
        prompts, each = point.get("reqs", 1), point.get("each", point["tokens"])
        pairs = prompts * each * each / 2
        yield StepLoad(num_prefill_tokens=point["tokens"], prefill_pairs=pairs), point["ms"] * 1e-3
    for point in profile.get("mixed", []):
        decodes, chunk = point["decode"], point["prefill"]
        yield StepLoad(decodes, chunk, decodes * point["ctx"], chunk * chunk / 2), point["ms"] * 1e-3


def _fit(points: list[tuple[StepLoad, float]]) -> StepTimes:
    """Least squares of the relative error, so that short steps count as much as long ones."""
    if len(points) < len(fields(StepTimes)):
        raise ValueError(f"{len(points)} points cannot determine {len(fields(StepTimes))} coefficients")
    seconds = np.array([measured for _, measured in points])
    loads = np.array(
        [
            (1.0, load.num_decodes, load.num_prefill_tokens, load.decode_context_tokens, load.prefill_pairs)
            for load, _ in points
        ]
    )
    coefficients, *_ = np.linalg.lstsq(loads / seconds[:, None], np.ones(len(points)), rcond=None)
    return StepTimes(*(max(0.0, float(value)) for value in coefficients))
