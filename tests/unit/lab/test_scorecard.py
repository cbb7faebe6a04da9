"""The scorecard: what it makes of measures that succeed, fall short, fail, hang on or are long."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_lab import scorecard
from octavo_lab.scorecard import Bound, Entry, at_least, at_most, load, runner
from octavo_lab.scorecard.__main__ import format_value, main

SOURCE = """
import asyncio, os
from octavo_lab.scorecard import Measurement, at_least, at_most, entry

@entry("try.ok", "ms", at_most(10))
def ok() -> float:
    '''a value that
    keeps its target

    How is not what.
    '''
    return 9.5

@entry("try.short", "ratio", at_least(2))
async def short() -> Measurement:
    '''a value that does not'''
    await asyncio.sleep(0)
    return Measurement(1.5, {"why": "too slow"})

@entry("try.plain", "count", measures="a value without a target")
def plain() -> float:
    return 3

@entry("try.raises", "s", at_most(1))
def raises() -> float:
    '''a measure that fails'''
    raise RuntimeError("no such luck")

@entry("try.dies", "s", at_most(1))
def dies() -> float:
    '''a measure whose process dies'''
    print("about to die", flush=True)
    os._exit(7)

@entry("try.long", "s", at_most(1), long=True)
def long_one() -> float:
    '''a measure that takes long'''
    return 0.5
"""


@pytest.fixture
def measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Adds one module to the measures, for child processes too, and forgets it afterwards."""
    (tmp_path / "extra_measures.py").write_text(SOURCE)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import octavo_lab.scorecard.measures as measures\nmeasures.__path__.append({str(tmp_path)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr("octavo_lab.scorecard.measures.__path__", [str(tmp_path)])
    known = dict(scorecard.entries)
    yield tmp_path
    scorecard.entries.clear()
    scorecard.entries.update(known)
    for module in ("extra_measures", "slow_measures"):
        sys.modules.pop(f"{scorecard.MEASURES}.{module}", None)


def test_run_every_kind_of_measure_gets_its_verdict(
    measures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = measures / "build" / "scorecard.json"
    assert main(["--only", "try.*", "--out", str(out)]) == 1

    records = {record["name"]: record for record in json.loads(out.read_text())}
    assert {name: record["verdict"] for name, record in records.items()} == {
        "try.ok": "ok",
        "try.short": "short",
        "try.plain": "measured",
        "try.raises": "error",
        "try.dies": "error",
        "try.long": "not run",
    }
    assert records["try.ok"]["value"] == 9.5
    assert records["try.ok"]["target"] == "≤ 10"
    assert records["try.ok"]["unit"] == "ms"
    assert records["try.ok"]["measures"] == "a value that keeps its target"
    assert records["try.plain"]["measures"] == "a value without a target"
    assert records["try.short"]["details"] == {"why": "too slow"}
    assert "no such luck" in records["try.raises"]["reason"]
    assert "exit code 7: about to die" in records["try.dies"]["reason"]
    table = capsys.readouterr().out
    assert "try.raises" in table
    assert "no such luck" in table


def test_long_entry_asked_for_runs(measures: Path) -> None:
    out = measures / "scorecard.json"
    assert main(["--only", "try.l*", "--long", "--out", str(out)]) == 0

    assert json.loads(out.read_text())[0]["verdict"] == "ok"


def test_only_pattern_without_a_match_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nothing.like.it"]) == 2
    assert "no entry" in capsys.readouterr().err


def test_measure_past_its_time_is_stopped(measures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (measures / "slow_measures.py").write_text(
        "import threading\n"
        "from octavo_lab.scorecard import entry\n"
        "@entry('slow.one', 's', measures='a measure that never ends')\n"
        "def one() -> float:\n"
        "    threading.Event().wait()\n"
        "    return 0.0\n"
    )
    monkeypatch.setattr(runner, "TIMEOUT_S", 1.0)
    (slow,) = load("slow.*")

    record = runner.run(slow)

    assert (record["verdict"], record["reason"]) == ("error", "not done within 1 s")


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (at_most(2), 2.0, "ok"),
        (at_most(2), 2.1, "short"),
        (at_least(2), 2.0, "ok"),
        (at_least(2), 1.9, "short"),
        (at_least(2), math.nan, "error"),
        (None, 1.0, "measured"),
    ],
)
def test_value_is_held_against_the_target(target: Bound | None, value: float, verdict: str) -> None:
    one = Entry("x", "x", "s", target, long=False, measure=lambda: value)

    assert runner.record(one, value)["verdict"] == verdict


def test_two_entries_of_one_name_are_refused(measures: Path) -> None:
    load("try.*")

    with pytest.raises(ValueError, match=r"try\.ok"):
        scorecard.entry("try.ok", "s", measures="again")(lambda: 1.0)


def test_committed_measures_all_load_and_are_described() -> None:
    for one in load():
        assert one.measures
        assert one.unit


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (12.0, "12"), (0.01234, "0.0123"), (612.7, "613"), (math.inf, "inf")]
)
def test_value_is_shown_with_the_digits_that_matter(value: float, shown: str) -> None:
    assert format_value(value) == shown
