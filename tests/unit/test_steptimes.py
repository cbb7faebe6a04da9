"""The one model of step times: its formula, its files, and its fit to measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from octavo.steptimes import FORMAT, StepTimes, StepTimesError

TIMES = StepTimes.builtin()
TABLE = {
    "decode": [
        {"batch": batch, "ctx": ctx, "ms": 1e3 * TIMES.seconds(batch, batch * ctx)}
        for batch in (1, 4, 16)
        for ctx in (64, 512, 2048)
    ],
    "prefill": [
        *({"tokens": n, "ms": 1e3 * TIMES.seconds(0, 0, n, n * n)} for n in (16, 128, 1024, 2048)),
        {"tokens": 512, "reqs": 4, "each": 128, "ms": 1e3 * TIMES.seconds(0, 0, 512, 4 * 128**2)},
    ],
}
MIXED = {"decode": 32, "ctx": 512, "prefill": 128, "ms": 1e3 * TIMES.seconds(32, 32 * 512, 128, 128**2)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


@pytest.mark.parametrize("table", [TABLE, {**TABLE, "mixed": [MIXED], "cfg": {"cores": 2}}])
def test_table_of_measured_steps_is_fitted(table: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(table))
    fitted = StepTimes.load(file)
    assert fitted.per_decode == pytest.approx(TIMES.per_decode, rel=1e-6)
    assert fitted.prefill_base == pytest.approx(TIMES.prefill_base, rel=1e-6)
    assert fitted.seconds(8, 4000, 256, 256**2) == pytest.approx(
        TIMES.seconds(8, 4000, 256, 256**2), rel=1e-6
    )


def test_fit_never_tells_of_a_time_below_zero() -> None:
    decode = [{**row, "ms": 5.0 - 0.1 * row["batch"]} for row in TABLE["decode"]]
    fitted = StepTimes.fit({**TABLE, "decode": decode})
    assert min(fitted.seconds(1, 1), fitted.seconds(1000, 10**6), fitted.seconds(0, 0, 1, 1)) >= 0.0


def test_coefficients_in_milliseconds_are_taken_as_given(file: Path) -> None:
    names = "base prefill_base per_decode per_context_token per_prefill_token per_prefill_token_squared"
    file.write_text(
        json.dumps({"format": FORMAT, "coefficients_ms": dict.fromkeys(names.split(), 0.0) | {"base": 40}})
    )
    assert StepTimes.load(file) == StepTimes(0.04, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_profile_in_the_format_before_is_read(file: Path) -> None:
    file.write_text('{"step_s": 0.5, "prefill_pair_s": 4e-7}')
    assert StepTimes.load(file) == replace(TIMES, base=0.5, prefill_base=0.0, per_prefill_token_squared=2e-7)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"format": "octavo-step-times/1"}',
        '{"decode": []}',
        '{"decode": [], "prefill": []}',
        '{"decode": [{"batch": 1, "ctx": 64, "ms": 8}], "prefill": [{"tokens": 64, "ms": 26}]}',
        '{"step_s": "x"}',
    ],
)
def test_file_that_holds_no_step_times_is_named(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(StepTimesError, match=r"profile\.json: not a file of step times"):
        StepTimes.load(file)


def test_file_that_is_missing_is_named(file: Path) -> None:
    with pytest.raises(StepTimesError, match=r"profile\.json: No such file"):
        StepTimes.load(file)


def test_prompt_costs_the_same_in_one_piece_or_in_chunks() -> None:
    chunks = sum(n * (n + 2 * start) for start, n in ((0, 100), (100, 100), (200, 100)))
    assert TIMES.seconds(0, 0, 300, 300**2) == TIMES.seconds(0, 0, 300, chunks)
