"""Reports: figures in words, tables as Markdown, and Markdown as a page. All that the laboratory tells goes
through here; its plots go through `octavo_lab.plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token
    from markdown_it.utils import EnvType, OptionsDict

MISSING: Final = "\N{EN DASH}"
"""In place of a figure that there is not, or too few observations for."""
_FIGURE_BEGINS: Final = frozenset(f"0123456789->{MISSING}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table that reads as it is: columns are padded, those of figures to the right."""
    lines = [[" ".join(str(cell).split()).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    columns = list(zip(*lines, strict=True))
    widths = [max(2, *map(len, column)) for column in columns]
    right = [any(column[1:]) and all(_is_figure(cell) for cell in column[1:] if cell) for column in columns]
    padded = [
        "| "
        + " | ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        )
        + " |"
        for row in lines
    ]
    marks = (
        "-" * (width + 1) + (":" if figures else "-") for width, figures in zip(widths, right, strict=True)
    )
    return "\n".join([padded[0], f"|{'|'.join(marks)}|", *padded[1:]])


def _is_figure(cell: str) -> bool:
    return cell[0] in _FIGURE_BEGINS and ", " not in cell


def page(markdown: str, pictures: Mapping[str, str]) -> str:
    """Return Markdown as one HTML page that needs nothing else; `pictures` are SVG, by their files.

    What looks like HTML in it is shown as text.
    """
    from markdown_it import MarkdownIt  # noqa: PLC0415 # only where a page is made

    def picture(
        self: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
    ) -> str:
        return pictures[str(tokens[index].attrs["src"])]

    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    renderer.add_render_rule("image", picture)
    style = (resources.files("octavo_lab") / "page.css").read_text("utf-8")
    title = next(line for line in markdown.splitlines() if line.startswith("# ")).removeprefix("# ")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n{renderer.render(markdown)}"
        "</body>\n</html>\n"
    )


# -- figures in words


def seconds(value: float) -> str:
    """Return a time span with three digits that matter."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def milliseconds(value_s: float | None) -> str:
    """Return a time in milliseconds with three digits that matter, without the unit."""
    if value_s is None:
        return MISSING
    ms = 1000 * value_s
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def share(value: float | None, digits: int = 1) -> str:
    """Return a share in percent."""
    return MISSING if value is None else f"{100 * value:.{digits}f}%"


def mib(value: int | None) -> str:
    """Return bytes in MiB."""
    return MISSING if value is None else f"{value / 2**20:,.0f} MiB"


def bounded(value: float, low: float | None, high: float | None, form: str = ".2f") -> str:
    """Return an estimate with the bounds of its interval, where it has both."""
    if low is None or high is None:
        return f"{value:{form}}"
    return f"{value:{form}} ({low:{form}} to {high:{form}})"
