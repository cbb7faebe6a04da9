"""`python -m octavo_lab.scorecard`: measure, print a table, write build/scorecard.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo.cli import output

from octavo_lab.scorecard.registry import Entry, load
from octavo_lab.scorecard.runner import Result, not_run, run

DEFAULT_OUT: Final = Path("build/scorecard.json")
_COLOURS: Final = {"ok": "green", "short": "red", "error": "red", "measured": "dim", "not run": "dim"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scorecard; return the exit code: 0 when everything asked for could be measured."""
    parser = argparse.ArgumentParser(prog="octavo_lab.scorecard", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell-style pattern on the name")
    parser.add_argument("--long", action="store_true", help="also run what takes more than a minute")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help=f"default: {DEFAULT_OUT}"
    )
    parser.add_argument("--list", action="store_true", help="only say what there is to measure")
    parsed = parser.parse_args(arguments)

    entries = load(parsed.only)
    if not entries:
        output.fail(f"no entry is called {parsed.only}")
        return 2
    if parsed.list:
        rows = [
            (one.name, one.unit, one.target or "", "long" if one.long else "", one.measures)
            for one in entries
        ]
        print(output.table(("NAME", "UNIT", "TARGET", "", "MEASURES"), rows))
        return 0
    show = _Table(entries)
    results = []
    for one in entries:
        results.append(not_run(one) if one.long and not parsed.long else run(one))
        show.row(results[-1])
        # After each, so that an interrupted run leaves what it has.
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps([result.as_record() for result in results], indent=2) + "\n")
    print(f"\nwritten to {parsed.out}")
    return 1 if any(result.verdict == "error" for result in results) else 0


class _Table:
    """Prints rows as they come, under a header that knows their widths."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._name = max(len("NAME"), *(len(one.name) for one in entries))
        self._unit = max(len("UNIT"), *(len(one.unit) for one in entries))
        self._target = max(len("TARGET"), *(len(str(one.target or "")) for one in entries))
        print(output.paint(self._line("NAME", "VALUE", "UNIT", "TARGET", "VERDICT"), "bold"), flush=True)

    def _line(self, name: str, value: str, unit: str, target: str, verdict: str) -> str:
        columns = (
            name.ljust(self._name),
            value.rjust(10),
            unit.ljust(self._unit),
            target.ljust(self._target),
        )
        return "  ".join((*columns, verdict))

    def row(self, result: Result) -> None:
        """Print one result."""
        value = "" if result.value is None else format_value(result.value)
        verdict = output.paint(result.verdict, _COLOURS[result.verdict])
        if result.reason:
            verdict += f": {' '.join(result.reason.split())[:160]}"
        target = str(result.entry.target or "")
        print(self._line(result.entry.name, value, result.entry.unit, target, verdict), flush=True)


def format_value(value: float) -> str:
    """Return a value with as many digits as say something."""
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
