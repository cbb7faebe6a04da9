"""The flags of `octavo bench fleet`: other traffic, other workers, and what goes wrong with them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from octavo.steptimes import FORMAT
from octavo_lab.command import BenchError
from octavo_lab.fleet import command as fleet

REST = "--trace poisson --workers 3 --requests 20 --seeds 1 --jobs 1 --json"
SMALL = f"healthy --prompt-tokens 60 --output-tokens 30 --cv 0.5 {REST}"


def bench(flags: str) -> Any:
    parser = argparse.ArgumentParser()
    fleet.configure(parser)
    return json.loads(fleet.run(parser.parse_args(flags.split())))


def outcomes(record: Any) -> dict[str, dict[str, Any]]:
    return {outcome["arm"]: outcome for outcome in record["outcomes"]}


def test_drawn_traffic_needs_no_trace_and_is_the_same_for_every_arm() -> None:
    record = bench(SMALL)

    assert record["fleets"]["healthy"]["num_workers"] == 3
    assert record["traffic"]["trace"] == "poisson"
    arms = outcomes(record)
    assert len(arms) == 5
    assert len({arm["span_s"] for arm in arms.values()}) == 1
    assert {(arm["requests"], arm["failed"]) for arm in arms.values()} == {(20, 0)}
    assert bench(SMALL) == record


def test_code_trace_is_read_in_place_of_the_conversations(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:17:{second:02}.0000000,500,7" for second in range(30)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (tmp_path / "azure_llm_2023_code.csv").write_text(text)

    flags = f"--traces {tmp_path} --requests 20 --seeds 1 --jobs 1 --json"
    assert outcomes(bench(f"healthy --trace azure-code {flags}"))["one queue"]["requests"] == 20
    with pytest.raises(BenchError, match=r"azure_llm_2023_conv\.csv"):
        bench(f"healthy {flags}")


def test_workers_are_as_fast_as_the_file_of_step_times_says(tmp_path: Path) -> None:
    names = "base prefill_base per_decode per_context_token per_prefill_token per_prefill_token_squared"
    path = tmp_path / "steps.json"
    path.write_text(
        json.dumps({"format": FORMAT, "coefficients_ms": dict.fromkeys(names.split(), 0.0) | {"base": 40.0}})
    )

    one_queue = outcomes(bench(f"{SMALL} --steps {path}"))["one queue"]

    # Each token takes a step of 40 ms, and nothing else takes time.
    assert one_queue["tpot_p50_s"] == pytest.approx(0.04, rel=0.05)
    path.write_text("{}")
    with pytest.raises(BenchError, match="not a file of step times"):
        bench(f"{SMALL} --steps {path}")


@pytest.fixture(scope="module")
def sound() -> dict[str, dict[str, Any]]:
    """What happens when nothing goes wrong."""
    return outcomes(bench(SMALL))


@pytest.mark.parametrize("kind", fleet.FAULTS)
def test_fault_strikes_and_every_request_ends_in_every_arm(
    kind: str, sound: dict[str, dict[str, Any]]
) -> None:
    struck = outcomes(bench(f"{SMALL} --fault {kind}=0.01"))

    assert all(arm["requests"] == 20 for arm in struck.values())
    assert any(struck[arm]["ttft_mean_s"] != sound[arm]["ttft_mean_s"] for arm in sound)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fault flood", "no fault 'flood': there are crash"),
        ("--fault crash=often", "chance per step"),
        ("--fault crash=0.5", "chance per step"),
        ("--workers 0", "must be workers"),
        ("--cv 30", "variation"),
    ],
)
def test_wrong_flag_is_named(flags: str, said: str) -> None:
    with pytest.raises(BenchError, match=said):
        bench(f"{SMALL} {flags}")


def test_one_worker_cannot_be_slow_and_leave() -> None:
    with pytest.raises(BenchError, match="with degraded 2"):
        bench(f"degraded {REST} --workers 1")
