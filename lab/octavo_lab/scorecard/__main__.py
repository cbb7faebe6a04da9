"""`python -m octavo_lab.scorecard`: measure, print a table, write build/scorecard.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo.cli import output

from octavo_lab.scorecard import load
from octavo_lab.scorecard.runner import Record, not_run, run

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
    widths = (
        max(map(len, ("NAME", *(one.name for one in entries)))),
        max(map(len, ("UNIT", *(one.unit for one in entries)))),
        max(map(len, ("TARGET", *(str(one.target or "") for one in entries)))),
    )
    print(output.paint(_line(widths, ("NAME", "VALUE", "UNIT", "TARGET")) + "VERDICT", "bold"), flush=True)
    records: list[Record] = []
    for one in entries:
        records.append(not_run(one) if one.long and not parsed.long else run(one))
        print(_row(widths, records[-1]), flush=True)
        # After each, so that an interrupted run leaves what it has.
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(records, indent=2) + "\n")
    print(f"\nwritten to {parsed.out}")
    return 1 if any(record["verdict"] == "error" for record in records) else 0


def _line(widths: tuple[int, int, int], cells: tuple[str, str, str, str]) -> str:
    (name, unit, target), (left, value, middle, right) = widths, cells
    return f"{left:{name}}  {value:>10}  {middle:{unit}}  {right:{target}}  "


def _row(widths: tuple[int, int, int], record: Record) -> str:
    value = "" if record["value"] is None else format_value(record["value"])
    verdict = output.paint(record["verdict"], _COLOURS[record["verdict"]])
    reason = f": {' '.join(record['reason'].split())[:160]}" if record["reason"] else ""
    return _line(widths, (record["name"], value, record["unit"], record["target"] or "")) + verdict + reason


def format_value(value: float) -> str:
    """Return a value with as many digits as say something."""
    if abs(value) < 1e9 and value == int(value):
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
