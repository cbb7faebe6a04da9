"""`python -m octavo_lab.scorecard.core_curves FILE.svg`: what the core costs by size, as a figure."""

from __future__ import annotations

import json
import sys
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from octavo_lab.scorecard.core_workload import admit_us, steady_decode

SEQUENCES: Final = (1, 8, 32, 64, 128, 256)
WORKERS: Final = (1, 10, 100, 1000)
Curve = dict[int, float]
"""Microseconds by size."""


def draw(by_sequences: Curve, by_workers: Curve, admission: Curve) -> Figure:
    """Draw a step by running sequences, and a step of 8 and an admission by workers."""
    mpl.rcParams.update({"svg.hashsalt": "octavo", "font.size": 10, "axes.spines.top": False})
    mpl.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, curve, colour, label in (
        (left, by_sequences, "#00704a", "report to next plan"),
        (right, by_workers, "#00704a", "report to next plan, 8 sequences"),
        (right, admission, "#c8553d", "admission of a prompt of 512 tokens"),
    ):
        axes.plot(list(curve), list(curve.values()), color=colour, marker="o", markersize=4, label=label)
    left.axhline(600, color="black", linewidth=0.8, linestyle=":")
    left.annotate("promised for 256", (2, 615), fontsize=8)
    left.set(xlabel="sequences that decode on the worker", ylabel="microseconds", ylim=(0, 700))
    right.set(xscale="log", xlabel="workers", ylim=(0, None))
    right.legend(frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    found = {
        "step_us_by_sequences": {n: steady_decode(1, n, 300).step_us() for n in SEQUENCES},
        "step_us_by_workers": {n: steady_decode(n, 8, 3000).step_us() for n in WORKERS},
        "admit_us_by_workers": {n: admit_us(n, 200) for n in WORKERS if n > 1},
    }
    print(json.dumps(found, indent=1))
    draw(*found.values()).savefig(sys.argv[1], bbox_inches="tight", metadata={"Date": None})
