"""Plots: one look for all of them, as files or as SVG that stands in a page."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

INK: Final = "#1f2328"
GREY: Final = "#8b949e"
GREEN: Final = "#0b6e4f"
RED: Final = "#b3261e"
BLUE: Final = "#3b6fb6"
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    # The same figures give the same file.
    "svg.hashsalt": "octavo",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.22,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "legend.frameon": False,
}
_LONG: Final = re.compile(r"(-?\d+\.\d{2})\d+")
"""A number of a path with more digits than anybody sees."""


def styled() -> AbstractContextManager[None]:
    """Return the look; a figure is made and written within it."""
    mpl.use("agg")
    return mpl.rc_context(_STYLE)


def panels(
    size: tuple[float, float], rows: int = 1, columns: int = 1, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many inches, and its panels, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False).flat)


def legend(figure: Figure, panel: Axes, columns: int = 2) -> None:
    """Put the legend of one panel below all of them."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def percent(value: float, place: float = 0.0) -> str:
    """Return a share as an axis tells it; for `set_major_formatter`."""
    del place
    return f"{value:.0%}" if value >= 0.01 or value == 0 else f"{value:.1%}"


def log_axis(axis: Axis) -> None:
    """Write plain numbers at an axis that is logarithmic: within a decade at 2 and 5, where there is room."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def save(figure: Figure, path: Path) -> None:
    """Write a figure, or raise OSError; the suffix says as what."""
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def svg(figure: Figure) -> str:
    """Return a figure as SVG as wide as the page lets it, without digits that nobody sees."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" *', r"\1", text[text.index("<svg") :], count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*" *', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda path: _LONG.sub(r"\1", path[0]), text)
