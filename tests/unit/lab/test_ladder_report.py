"""The report of a ladder, from cells that nobody ran."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from octavo_lab.ladder.cells import CellStore
from octavo_lab.ladder.config import ARMS, CONTROL, FULL, RUNGS, SUBJECT, StaticSettings
from octavo_lab.ladder.experiment import LadderRecord, Measurements
from octavo_lab.ladder.pages import paragraphs, write
from octavo_lab.ladder.plan import CellPlan, loads_of, plan_cells
from octavo_lab.ladder.report import make_report
from octavo_lab.ladder.search import CapacitySearch, Probe, SearchResult
from octavo_lab.load.records import RunRecord
from octavo_lab.load.statistics import Interval
from octavo_lab.stored import read_record, write_record

from tests.unit.lab.ladder_samples import cell, drawn

STATIC = [name for name, arm in ARMS.items() if arm.static]
CAPACITIES = {name: (5.0 if name in STATIC else 15.0) for name in ARMS}


def probe(batch_size: int, rate: float) -> Probe:
    return Probe(
        arm=CONTROL,
        kind="saturated",
        requests=24,
        batch_size=batch_size,
        requests_per_s=rate,
        tokens_per_s=20 * rate,
        mean_e2e_s=1.0,
    )


FOUND = SearchResult({name: StaticSettings() for name in STATIC}, CAPACITIES, (probe(4, 4.0), probe(8, 5.5)))


def measured(arms: tuple[str, ...] = tuple(ARMS), cells: int | None = None) -> Measurements:
    config = replace(FULL, arms=arms, repeats=2)
    loads = loads_of(config, CAPACITIES)
    plan = plan_cells(config, loads, 1500.0)
    results = []
    for one in plan.cells[:cells]:
        overloaded = one.rate_per_s > CAPACITIES[one.arm]
        results.append(
            drawn(
                one,
                0.8 if one.arm in STATIC else 0.2,
                unanswered=int(one.window_s * one.rate_per_s / 2) if overloaded else 0,
                written=0.3 if one.arm in STATIC else 0.95,
            )
        )
    head = LadderRecord(
        config=config,
        environments=[{"hardware": {"cpu": "a & b", "cores": 2}, "software": {"os": "Linux"}}],
        started_at="2026-01-01T00:00:00+00:00",
        dataset={"description": "made <up>"},
    )
    return Measurements(head=head, found=FOUND, loads=loads, plan=plan, results=results)


def test_report_is_written_with_every_cell_and_plot(tmp_path: Path) -> None:
    paths = write(make_report(measured()), tmp_path)
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    record, text, page = (path.read_text() for path in paths)
    told = json.loads(record)
    assert {(one["arm"], one["rung"]) for one in told["figures"]} == {
        (arm, rung) for arm in ARMS for rung in told["loads"]["rungs"]
    }
    assert told["partial"] is False
    assert told["comparison"]["kv_use_paged"] == 0.95
    assert told["comparison"]["p50_ratio"]["value"] < 0.6
    assert "nan" not in text.lower()
    for rung in told["loads"]["rungs"]:
        assert RUNGS[rung] in text
    # The page needs nothing from elsewhere, and what comes from outside is no markup.
    assert page.count("<svg") == 5
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert "made &lt;up&gt;" in page
    assert "made <up>" not in page


@pytest.mark.parametrize("cells", [1, 3, 11])
def test_report_of_what_was_measured_before_an_interrupt_says_that_it_is_partial(
    tmp_path: Path, cells: int
) -> None:
    report = make_report(measured(cells=cells))
    _, text, page = (path.read_text() for path in write(report, tmp_path))
    assert f"{cells} of" in text
    assert "Partial" in text
    assert "Partial" in page


def test_report_of_two_arms_is_whole(tmp_path: Path) -> None:
    report = make_report(measured((CONTROL, SUBJECT)))
    text = write(report, tmp_path)[1].read_text()
    assert "Partial" not in text
    assert "met" in text


def test_report_attributes_nothing_to_a_step_that_cannot_be_told_from_none() -> None:
    report = make_report(measured())
    sure = Interval(1.5, 1.2, 1.9)
    steps = [
        replace(report.changes[0], what="one", ratio=sure),
        replace(report.changes[0], what="two", ratio=Interval(1.6, 0.9, 2.8)),
        replace(report.changes[0], what="three", ratio=Interval(1.7, None, None)),
    ]
    comparison = replace(
        report.comparison,
        throughput_ratio=Interval(2.4, 2.0, 2.9),
        best_static="static-nowaste",
        best_static_over_control=Interval(1.6, 0.9, 2.8),
        throughput_of_best_static=sure,
    )
    told = dict(paragraphs(replace(report, changes=steps, comparison=comparison)))["Throughput"]
    assert "2.40 (2.00 to 2.90) times" in told
    assert "one: x1.50 (1.20 to 1.90)" in told
    assert "two" not in told
    assert "three" not in told
    assert "2 of 3 steps cannot be told from none" in told
    assert "waste" not in told
    assert "x1.50 (1.20 to 1.90) is what continuous batching" in told


def test_report_prints_no_p99_from_too_few_requests() -> None:
    rows = make_report(measured()).rows()
    for row in rows:
        if row.requests < 500:
            assert row.e2e.p99.interval is None
            assert row.ttft.p99.interval is None


def test_cell_survives_its_file(tmp_path: Path) -> None:
    store, one = CellStore(tmp_path), drawn(cell(), 0.5, unanswered=3, written=0.6)
    assert not store.has(one.cell)
    store.put(one)
    assert store.has(one.cell)
    again = store.get(one.cell)
    assert again.samples == one.samples
    assert [r.outcome for r in again.run.requests] == [r.outcome for r in one.run.requests]
    assert [path.name for path in tmp_path.iterdir()] == ["middle.0.static.json"]


class Saturating:
    """Stacks and driver of a search; remembers what each probe asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def use(self, arm: object, static: StaticSettings) -> None:
        return None

    def warm(self, stack: object) -> None:
        return None

    def saturate(self, stack: object, count: int, concurrency: int, seed: int) -> RunRecord:
        self.asked.append((count, concurrency, seed))
        return drawn(cell(), 0.5).run


@pytest.mark.parametrize("arm", ["static-nowaste", "static-buckets"])
def test_search_tries_all_batch_sizes_with_the_same_requests(arm: str) -> None:
    lab = Saturating()
    CapacitySearch(replace(FULL, arms=(arm,)), lab, lab, lambda what: None).run()  # type: ignore[arg-type]
    assert len(lab.asked) == len(FULL.batch_sizes)
    assert len(set(lab.asked)) == 1


def test_search_survives_its_file(tmp_path: Path) -> None:
    write_record(tmp_path / "search.json", FOUND)
    assert read_record(tmp_path / "search.json", SearchResult) == FOUND


def test_report_without_cells_can_be_made(tmp_path: Path) -> None:
    nothing = replace(measured(), results=[], plan=CellPlan((), 1, 0.0, ()))
    assert write(make_report(nothing), tmp_path)
