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
from octavo_lab.scorecard.runner import Record, record, run

OUT: Final = Path("build/scorecard.json")
_COLOURS: Final = {"ok": "green", "short": "red", "error": "red", "measured": "dim", "not run": "dim"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scorecard; return the exit code: 0 when everything asked for could be measured."""
    parser = argparse.ArgumentParser(prog="octavo_lab.scorecard", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell-style pattern on the name")
    parser.add_argument("--long", action="store_true", help="also run what takes more than a minute")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT}")
    parser.add_argument("--list", action="store_true", help="only say what there is to measure")
    parsed = parser.parse_args(arguments)

    entries = load(parsed.only)
    if not entries:
        output.fail(f"no entry is called {parsed.only}")
        return 2
    if parsed.list:
        rows = [(e.name, e.unit, e.target or "", "long" if e.long else "", e.measures) for e in entries]
        print(output.table(("NAME", "UNIT", "TARGET", "", "MEASURES"), rows))
        return 0
    name, unit = (max(len(getattr(one, cell)) for one in entries) for cell in ("name", "unit"))
    row = f"{{:{name}}}  {{:>10}}  {{:{unit}}}  {{:6}}  "
    print(output.paint(row.format("NAME", "VALUE", "UNIT", "TARGET") + "VERDICT", "bold"), flush=True)
    records: list[Record] = []
    for one in entries:
        wanted = parsed.long or not one.long
        found = run(one) if wanted else record(one, reason="takes long; LONG=1 runs it", verdict="not run")
        value = "" if found["value"] is None else format_value(found["value"])
        reason = f": {' '.join(found['reason'].split())[:160]}" if found["reason"] else ""
        verdict = output.paint(found["verdict"], _COLOURS[found["verdict"]])
        print(row.format(one.name, value, one.unit, found["target"] or "") + verdict + reason, flush=True)
        # After each, so that an interrupted run leaves what it has.
        records.append(found)
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(records, indent=2) + "\n")
    print(f"\nwritten to {parsed.out}")
    return 1 if any(found["verdict"] == "error" for found in records) else 0


def format_value(value: float) -> str:
    """Return a value with as many digits as say something."""
    if abs(value) < 1e9 and value == int(value):
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
