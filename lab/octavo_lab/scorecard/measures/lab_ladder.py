"""Static against continuous, contiguous against paged: the ladder's figures, from a report.

OCTAVO_LADDER names the folder of a ladder that has been run (`octavo bench ladder --preset full`), and its
report is read. Without it the two arms that are compared are measured now, which takes half an hour.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octavo_lab.scorecard import Measured, at_least, at_most, entry

FOLDER_VARIABLE: Final = "OCTAVO_LADDER"
REPORT: Final = "report.json"
_BUDGET_S: Final = 30 * 60.0


@entry(
    "lab.throughput_ratio",
    "tokens per second of a saturated service, continuous + paged + chunked prefill to the tuned control "
    "(static + contiguous)",
    "times",
    at_least(1.5),
    long=True,
)
def throughput_ratio() -> Measured:
    """At the highest rung, 1.5 times the capacity of the best arm."""
    return _interval("throughput_ratio")


@entry(
    "lab.p50_ratio",
    "end-to-end P50 at the control's capacity, continuous + paged + chunked prefill to the control",
    "ratio",
    at_most(0.6),
    long=True,
)
def p50_ratio() -> Measured:
    """Over all requests, those without an answer as slower than all others."""
    return _interval("p50_ratio")


@entry("lab.p99_ratio", "the same for the P99", "ratio", at_most(0.5), long=True)
def p99_ratio() -> Measured:
    """As the P50, from at least 500 requests of each."""
    return _interval("p99_ratio")


@entry(
    "lab.kv_use_paged",
    "written slots over all slots of the paged pool, over the time in which requests waited, saturated",
    "share",
    at_least(0.93),
    long=True,
)
def kv_use_paged() -> Measured:
    """At the highest rung."""
    return _share("kv_use_paged")


@entry("lab.kv_use_static", "the same of the control's contiguous memory", "share", long=True)
def kv_use_static() -> Measured:
    """At the highest rung. The control knows each answer's length, so it reserves no more than it needs."""
    return _share("kv_use_static")


def _interval(name: str) -> Measured:
    report = _report()
    found = report["comparison"][name]
    if found is None:
        return Measured(
            float("nan"), {"why": "too few requests, or the arms were not measured", **_about(report)}
        )
    details = {"low": found["low"], "high": found["high"], **_about(report)}
    if name == "throughput_ratio" and report["comparison"]["throughput_of_best_static"]:
        details["to the best static arm"] = report["comparison"]["throughput_of_best_static"]["value"]
    return Measured(found["value"], details)


def _share(name: str) -> Measured:
    report = _report()
    found = report["comparison"][name]
    return Measured(float("nan") if found is None else found, _about(report))


def _about(report: Mapping[str, Any]) -> dict[str, Any]:
    hardware = report["environments"][-1]["hardware"]
    return {
        "preset": report["config"]["preset"],
        "partial": report["partial"],
        "begun": report["started_at"],
        "on": f"{hardware['cpu']}, {hardware['cores']} cores",
    }


def _report() -> dict[str, Any]:
    """Return the report that is named, or that of a run of the two arms.

    Each entry has a process of its own; those of one scorecard share what the first of them has measured.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"octavo-ladder-{os.getppid()}"
    if not named and not (folder / REPORT).exists():
        _measure(folder)
    report: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return report


def _measure(folder: Path) -> None:
    # Not earlier: they need the extra `bench`, and listing entries does not.
    from octavo_lab.ladder.config import QUICK  # noqa: PLC0415
    from octavo_lab.ladder.experiment import Experiment  # noqa: PLC0415
    from octavo_lab.ladder.report import make_report, write  # noqa: PLC0415
    from octavo_lab.ladder.workload import Workload  # noqa: PLC0415

    config = replace(QUICK, budget_s=_BUDGET_S)
    experiment = Experiment(config, folder, Workload(config), lambda what, fraction, left_s: None)
    experiment.run()
    write(make_report(experiment.measured()), folder)
