"""`octavo replay`: does a plan log come out the same again, and why did a request wait?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.cli import output

if TYPE_CHECKING:
    from octavo.status import UsageReport

    from scheduler_svc.planlog import Line, Mismatch, ReplayResult, RequestStory, Waits

EXIT_OK: Final = 0
EXIT_DIFFERS: Final = 1
EXIT_USAGE: Final = 2
_SHOWN_MISMATCHES: Final = 5
_PLAN_FIELDS: Final = ("admit", "prefill", "skip", "seal", "release", "resume_after")


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("file", type=Path, metavar="FILE", help="a plan log, as written by --plan-log")
    parser.add_argument(
        "--explain", metavar="REQUEST_ID", help="tell at each step for which this request waited, why"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    try:
        from scheduler_svc import planlog  # noqa: PLC0415 # an extra that may not be installed
    except ModuleNotFoundError as error:
        output.fail(f"octavo replay needs {error.name}: pip install 'octavo[scheduler]'")
        return EXIT_DIFFERS
    story = planlog.RequestStory(arguments.explain) if arguments.explain else None
    waits = planlog.Waits()
    try:
        result = planlog.replay(arguments.file, story or waits)
    except (planlog.PlanLogError, OSError) as error:
        output.fail(str(error))
        return EXIT_USAGE
    if story is not None and not story.lines:
        output.fail(f"no request {arguments.explain!r} in {arguments.file}")
        return EXIT_USAGE
    if arguments.json:
        print(output.to_json(_as_record(result, story, waits)))
    elif story is not None:
        print(_story(story))
        print("\n" + _verdict(result))
    else:
        print(_summary(result, waits))
    return EXIT_DIFFERS if result.differs or result.damaged_bytes else EXIT_OK


def usage(path: Path) -> UsageReport:
    """Return who used the devices in the time of a plan log; for `octavo usage`.

    Raises:
        ValueError: it is no plan log, or another version's.
        OSError: it cannot be read.
    """
    from scheduler_svc import planlog  # noqa: PLC0415 # an extra that may not be installed

    try:
        return planlog.usage_of(path)
    except planlog.PlanLogError as error:
        raise ValueError(str(error)) from error


def explain(path: Path, request_id: str, *, as_json: bool) -> int:
    """Say where the time of a request went; for `octavo explain`. Return the exit code."""
    from scheduler_svc.planlog import PlanLogError, explain_command  # noqa: PLC0415 # an extra

    try:
        account, story = explain_command.account_of(path, request_id)
    except (PlanLogError, OSError) as error:
        output.fail(str(error))
        return EXIT_USAGE
    if as_json:
        print(output.to_json(explain_command.as_record(account, story)))
    else:
        print(f"{explain_command.shown(account)}\n\n{_story(story)}")
    return EXIT_OK


def _as_record(result: ReplayResult, story: RequestStory | None, waits: Waits) -> dict[str, Any]:
    return {
        "events": dict(result.events),
        "plans": result.plans,
        "mismatches": result.mismatches,
        "effect_mismatches": result.effect_mismatches,
        "seconds": result.seconds,
        "torn_bytes": result.torn_bytes,
        "damaged_bytes": result.damaged_bytes,
        "raised": result.raised,
        "gap": _gap(result),
        "octavo_version": result.octavo_version,
        "longest_waits": dict(waits.longest()) if story is None else {},
        "story": story.lines if story is not None else [],
    }


def _summary(result: ReplayResult, waits: Waits) -> str:
    events = ", ".join(f"{count} {kind}" for kind, count in result.events.most_common())
    lines = [f"events    {events or 'none'}", f"span      {output.duration(result.seconds)}"]
    if (gap := _gap(result)) is not None:
        missing = f"{gap['entries']} entries of the {output.duration(gap['seconds'])} before: {gap['error']}"
        lines.append(f"missing   {missing}")
    if result.torn_bytes:
        lines.append(f"torn      {result.torn_bytes} bytes after the last whole entry, left out")
    if result.raised is not None:
        lines.append(f"ended by  {output.paint(result.raised, 'red')}, as then")
    longest = waits.longest()
    if longest:
        rows = [(request_id, output.duration(seconds)) for request_id, seconds in longest]
        lines += ["", output.table(("LONGEST WAITS", "QUEUED"), rows, right=(1,))]
    lines += ["", _verdict(result)]
    return "\n".join(lines)


def _gap(result: ReplayResult) -> dict[str, Any] | None:
    if result.gap is None:
        return None
    until = result.first_now if result.first_now is not None else result.gap.since
    return {
        "since": result.gap.since,
        "seconds": until - result.gap.since,
        "entries": result.gap.entries,
        "error": result.gap.error,
    }


def _verdict(result: ReplayResult) -> str:
    if result.damaged_bytes:
        damage = f"the file is damaged: its last {result.damaged_bytes} bytes are left out; before them"
        return "\n".join([output.paint(damage, "red"), _comparison(result)])
    return _comparison(result)


def _comparison(result: ReplayResult) -> str:
    if not result.differs:
        return output.paint(f"all {result.plans} plans are the same, byte for byte", "green")
    text = f"{len(result.mismatches)} of {result.plans} plans differ"
    if result.effect_mismatches:
        text += f", and other effects of {result.effect_mismatches} events"
    if (ours := metadata.version("octavo")) != result.octavo_version:
        text += f"; octavo {result.octavo_version} wrote the file, and this is {ours}"
    shown = result.mismatches[:_SHOWN_MISMATCHES]
    return "\n".join([output.paint(text, "red"), *map(_mismatch, shown)])


def _mismatch(mismatch: Mismatch) -> str:
    logged, replayed = mismatch.logged, mismatch.replayed
    where = f"entry {mismatch.entry}, at {mismatch.now:.6f} s, {mismatch.worker_id}"
    if logged is None or replayed is None:
        plan = logged or replayed
        step = plan.step if plan is not None else 0
        return f"  {where}: step {step} was planned only {'in the replay' if logged is None else 'then'}"
    fields = [name for name in _PLAN_FIELDS if getattr(logged, name) != getattr(replayed, name)]
    return f"  {where}: step {logged.step} differs in {', '.join(fields) or 'its encoding'}"


def _story(story: RequestStory) -> str:
    rows = [_row(line) for line in story.lines]
    header = ("AFTER", "FOR", "PLANS", "WORKER", "STEP", "CHOICE", "WHAT", "WHY")
    return output.table(header, rows, right=(0, 1, 2, 4, 5))


def _row(line: Line) -> Sequence[object]:
    lasted = output.duration(line.until_s - line.at_s) if line.until_s > line.at_s else ""
    return (
        f"{line.at_s:.3f} s",
        lasted,
        line.plans or "",
        line.worker_id,
        "" if line.step is None else line.step,
        "" if line.choice is None else line.choice,
        line.what,
        line.why,
    )
