"""Static against continuous, contiguous against paged: the ladder's figures, from a report.

OCTAVO_LADDER names the folder of a ladder that has been run (`octavo bench ladder --preset full`), and its
report is read. Without it the two arms that are compared are measured now, which takes half an hour.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from octavo_lab.ladder.config import QUICK
from octavo_lab.ladder.experiment import Experiment
from octavo_lab.ladder.report import make_report, write
from octavo_lab.ladder.workload import Workload
from octavo_lab.scorecard import Measured, at_least, at_most, entry

REPORT: Final = "report.json"


def _figure(name: str) -> Measured:
    """Return a figure of the report's comparison: a share, or an estimate with its bounds."""
    report = _report()
    compared, hardware = report["comparison"], report["environments"][-1]["hardware"]
    details = {
        "preset": report["config"]["preset"],
        "partial": report["partial"],
        "begun": report["started_at"],
        "on": f"{hardware['cpu']}, {hardware['cores']} cores",
    }
    found = compared[name]
    if found is None:
        return Measured(math.nan, {"why": "too few requests, or the arms were not measured", **details})
    if not isinstance(found, dict):
        return Measured(found, details)
    if name == "throughput_ratio" and compared["throughput_of_best_static"]:
        details["to the best static arm"] = compared["throughput_of_best_static"]["value"]
    return Measured(found["value"], {"low": found["low"], "high": found["high"], **details})


def _report() -> dict[str, Any]:
    """Return the report that is named, or that of a run of the two arms.

    Each entry has a process of its own; those of one scorecard share what the first of them has measured.
    """
    named = os.environ.get("OCTAVO_LADDER")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"octavo-ladder-{os.getppid()}"
    if not named and not (folder / REPORT).exists():
        config = replace(QUICK, budget_s=30 * 60.0)
        experiment = Experiment(config, folder, Workload(config), lambda what, fraction, left_s: None)
        experiment.run()
        write(make_report(experiment.measured()), folder)
    report: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return report


for name, unit, target, measures in (
    # At the highest rung, 1.5 times the capacity of the best arm.
    (
        "throughput_ratio",
        "times",
        at_least(1.5),
        "tokens per second of a saturated service, continuous + paged + chunked prefill to the tuned control "
        "(static + contiguous)",
    ),
    # Over all requests, those without an answer as slower than all others.
    (
        "p50_ratio",
        "ratio",
        at_most(0.6),
        "end-to-end P50 at the control's capacity, continuous + paged + chunked prefill to the control",
    ),
    # From at least 500 requests of each.
    ("p99_ratio", "ratio", at_most(0.5), "the same for the P99"),
    # At the highest rung.
    (
        "kv_use_paged",
        "share",
        at_least(0.93),
        "written slots over all slots of the paged pool, over the time in which requests waited, saturated",
    ),
    # The control knows each answer's length, so it reserves no more than it needs.
    ("kv_use_static", "share", None, "the same of the control's contiguous memory"),
):
    entry(f"lab.{name}", unit, target, long=True, measures=measures)(partial(_figure, name))
