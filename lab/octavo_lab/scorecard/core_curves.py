"""`python -m octavo_lab.scorecard.core_curves FILE.svg`: what the core costs by size, as a figure."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo_lab.scorecard.core_workload import admissions, steady_decode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEQUENCES: Final = (1, 8, 32, 64, 128, 256)
WORKERS: Final = (1, 10, 100, 1000)
Curve = dict[int, float]
"""Microseconds by size."""


def curves() -> dict[str, Curve]:
    """Measure: a step by running sequences, a step of 8 and an admission by workers."""
    return {
        "step_us_by_sequences": {n: steady_decode(1, n, 300).step_us() for n in SEQUENCES},
        "step_us_by_workers": {n: steady_decode(n, 8, 3000).step_us() for n in WORKERS},
        "admit_us_by_workers": {
            n: 1e6 * statistics.median(admissions(n, 200).submit_s) for n in WORKERS if n > 1
        },
    }


def draw(found: dict[str, Curve], path: Path) -> None:
    """Draw the curves."""
    import matplotlib as mpl  # noqa: PLC0415 # slow to import, and only needed here
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "octavo", "font.size": 10, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _line(left, found["step_us_by_sequences"], "#00704a", "report to next plan")
    left.axhline(600, color="black", linewidth=0.8, linestyle=":")
    left.annotate("promised for 256", (2, 615), fontsize=8)
    left.set_xlabel("sequences that decode on the worker")
    left.set_ylabel("microseconds")
    left.set_ylim(0, 700)
    _line(right, found["step_us_by_workers"], "#00704a", "report to next plan, 8 sequences")
    _line(right, found["admit_us_by_workers"], "#c8553d", "admission of a prompt of 512 tokens")
    right.set_xscale("log")
    right.set_xlabel("workers")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=9)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _line(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    axes.plot(list(curve), list(curve.values()), color=colour, marker="o", markersize=4, label=label)


def main() -> int:
    """Measure, print as JSON, and draw into the file named by the argument."""
    (name,) = sys.argv[1:]
    found = curves()
    print(json.dumps(found, indent=1))
    draw(found, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
