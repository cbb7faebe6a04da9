"""`octavo usage`: who has used the devices, and what that costs."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from octavo.cli import output, request
from octavo.cli.durations import duration
from octavo.status import TenantUsage, UsagePeriod, UsageReport

IDLE: Final = "(idle)"
UNASSIGNED: Final = "(unassigned)"
_COLUMNS: Final = (
    "from", "until", "tenant", "requests", "prompt_tokens", "output_tokens", "device_s", "share", "cost",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "--since",
        type=duration,
        metavar="TIME",
        help="of the last 90m or 12h (default: all that is kept, a day)",
    )
    parser.add_argument("--by-minute", action="store_true", help="one line per tenant and minute, not in all")
    parser.add_argument(
        "--plan-log",
        type=Path,
        metavar="FILE",
        help="of a past time, from the plan log that was written then",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    if arguments.plan_log is not None:
        report = _of_plan_log(arguments.plan_log, arguments.since)
    else:
        with request.connect(arguments) as client:
            report = client.usage(arguments.since)
    periods = report.periods if arguments.by_minute else together(report.periods)
    if arguments.json:
        print(output.to_json(UsageReport(periods, report.price_per_gpu_hour)))
        return 0
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for period in periods:
        writer.writerows(_rows(period, report.price_per_gpu_hour))
    return 0


def _of_plan_log(path: Path, since_s: float | None) -> UsageReport:
    from octavo.cli.main import load_command  # noqa: PLC0415 # which loads this module

    plan_log: Any = load_command("replay")
    try:
        report: UsageReport = plan_log.usage(path)
    except (ValueError, OSError) as error:
        output.fail(str(error))
        sys.exit(2)
    if since_s is None or not report.periods:
        return report
    after = report.periods[-1].until_unix_s - since_s
    return UsageReport(tuple(one for one in report.periods if one.until_unix_s > after))


def together(periods: tuple[UsagePeriod, ...]) -> tuple[UsagePeriod, ...]:
    """Return periods as one, or none when there are none."""
    if not periods:
        return ()
    sums: dict[str, TenantUsage] = {}
    for one in (tenant for period in periods for tenant in period.tenants):
        had = sums.get(one.tenant, TenantUsage(one.tenant, 0, 0, 0, 0.0))
        sums[one.tenant] = TenantUsage(
            one.tenant,
            had.requests + one.requests,
            had.prompt_tokens + one.prompt_tokens,
            had.output_tokens + one.output_tokens,
            had.device_s + one.device_s,
        )
    return (
        UsagePeriod(
            periods[0].from_unix_s,
            periods[-1].until_unix_s,
            tuple(sums[name] for name in sorted(sums)),
            sum(period.idle_device_s for period in periods),
            sum(period.unassigned_device_s for period in periods),
        ),
    )


def _rows(period: UsagePeriod, price: float | None) -> Iterator[tuple[object, ...]]:
    total_s = sum(one.device_s for one in period.tenants) + period.idle_device_s + period.unassigned_device_s
    began, ended = (
        datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        for at in (period.from_unix_s, period.until_unix_s)
    )
    nobody = ((IDLE, period.idle_device_s), (UNASSIGNED, period.unassigned_device_s))
    others = [TenantUsage(name, 0, 0, 0, seconds) for name, seconds in nobody]
    for one in (*period.tenants, *others):
        share = f"{one.device_s / total_s:.6f}" if total_s else ""
        cost = f"{price * one.device_s / 3600:.6f}" if price is not None else ""
        counts = (one.requests, one.prompt_tokens, one.output_tokens)
        yield (began, ended, one.tenant, *counts, f"{one.device_s:.6f}", share, cost)
