"""`octavo bench overload`: a service driven past its capacity and back, as a timeline."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from octavo.cli import output
from octavo.stack import Stack, StackConfig, StackError

from octavo_lab.command import BenchError, Flag, add_flags, claim_folder
from octavo_lab.load.arrivals import Phase, Phases
from octavo_lab.load.records import Outcome
from octavo_lab.load.statistics import needed
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.overload import drive
from octavo_lab.overload.drive import QUANTILES, Timeline
from octavo_lab.plots import BLUE, GREEN, GREY, INK, RED, panels, save, styled
from octavo_lab.report import milliseconds, table

LEVELS: Final = ("normal", "trim", "shed batch", "shed standard", "open")
_BUCKET_S: Final = 2.0
FLAGS: Final[tuple[Flag, ...]] = (
    ("--endpoint", str, None, "HOST:PORT", "a scheduler to drive; by default a stack is started"),
    ("--model", str, "demo", "MODEL", "of the stack that is started; `sim` needs no model"),
    ("--max-num-seqs", int, 16, "N", "of the stack that is started"),
    ("--capacity", float, None, "X", "requests per second; by default it is measured"),
    ("--load", float, 2.0, "X", "overload, over the capacity"),
    ("--base", float, 0.5, "X", "load before and after"),
    ("--phases", str, "40,60,40", "S,S,S", "seconds before, of and after the overload"),
    ("--calibrate", float, 20.0, "S", "seconds at capacity"),
    ("--out", Path, None, "DIR", "write timeline.json and timeline.png there"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_flags(parser, FLAGS)
    add = parser.add_argument
    add("--priority", choices=("interactive", "standard", "batch"), default="interactive", help="class")
    repeated = "argument of the worker that is started; repeatable"
    add("--worker-arg", action="append", default=[], metavar="ARG", help=repeated)
    add("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Drive; return the table."""
    try:
        before, during, after = map(float, arguments.phases.split(","))
    except ValueError:
        raise BenchError(f"--phases is three numbers of seconds, got {arguments.phases!r}") from None
    if min(before, during, after) <= 0:
        raise BenchError("phases must take some time")
    if min(arguments.load, arguments.base, arguments.calibrate, arguments.max_num_seqs) <= 0:
        raise BenchError("loads, seconds and sequences must be positive")
    if arguments.out is not None:
        claim_folder(arguments.out)
    with ExitStack() as stack:
        endpoint = arguments.endpoint or _start(stack, arguments)
        timeline = asyncio.run(_drive(endpoint, arguments, (before, during, after)))
    record = json.dumps(timeline.as_record(), indent=2, allow_nan=False)
    told = record if arguments.json else as_text(timeline)
    if arguments.out is not None:
        try:
            (arguments.out / "timeline.json").write_text(record)
            plot(timeline, arguments.out / "timeline.png")
        except OSError as error:
            raise BenchError(str(error), partial=told) from error
        output.note(f"wrote {arguments.out}/timeline.json and timeline.png")
    return told


def _start(stack: ExitStack, arguments: argparse.Namespace) -> str:
    """Start scheduler and worker; return where they are."""
    runner = ["--runner", "sim"] if arguments.model == "sim" else []
    flags = ["--max-num-seqs", str(arguments.max_num_seqs), *arguments.worker_arg, *runner]
    child = stack.enter_context(Stack(StackConfig(model=arguments.model, worker_args=flags)))
    try:
        with output.ProgressLine() as line:
            child.wait_ready(on_progress=line)
    except StackError as error:
        raise BenchError(str(error)) from error
    return child.endpoint


async def _drive(
    endpoint: str, arguments: argparse.Namespace, phases: tuple[float, float, float]
) -> Timeline:
    before, during, _ = phases
    async with OctavoTarget(endpoint) as target:
        seats = drive.seats_of(target.record.details)
        output.note("measuring the capacity")
        # No deadline here: whoever waits for a place is to get it.
        served = await target.client.models()
        models = {name: model for model in served for name in (*model.adapters, model.id)}
        first, last = drive.Mix().vocabulary
        plain = drive.Mix(vocabulary=(first, min(last, models[target.record.model].vocab_size)))
        measured = await drive.calibrate(target, plain, 2 * seats, arguments.calibrate)
        if arguments.capacity is not None:
            measured = replace(measured, capacity_per_s=arguments.capacity)
        capacity = measured.capacity_per_s
        output.note(f"{capacity:.2f} requests per second; driving {arguments.load:g} times as many")
        loads = zip(phases, (arguments.base, arguments.load, arguments.base), strict=True)
        plan = Phases(tuple(Phase(seconds, load * capacity) for seconds, load in loads))
        terms = {"priority": arguments.priority, "ttft_deadline": drive.TTFT_SLO_S}
        async with drive.watch(target.client) as looks:
            record = await drive.through(target, replace(plain, options=terms), plan)
    return Timeline(record, looks, measured, before, before + during, min(5.0, before / 4))


def as_text(timeline: Timeline) -> str:
    """Return a table of the phases, and how long the way back took."""
    record, measured = timeline.as_record(), timeline.calibration
    rows = []
    for name in ("baseline", "overload", "recovery"):
        one = record[name]
        ended = ", ".join(f"{count} {reason}" for reason, count in one["outcomes"].items())
        rates = (f"{one['offered_per_s']:.2f}", f"{one['goodput_per_s']:.2f}")
        ttfts = map(milliseconds, (one["ttft_p50_s"], one["ttft_p99_s"]))
        rows.append((name, *rates, *ttfts, one["highest_level"], ended))
    ttft_ms, tpot_ms = measured.unloaded_ttft_s * 1000, measured.unloaded_tpot_s * 1000
    header = ("phase", "offered/s", "good/s", "TTFT P50 ms", "TTFT P99 ms", "level", "ended")
    at, back_s = timeline.latency_quantile, timeline.latency_back_s
    if at is None:
        latency = f"TTFT of the baseline unknown: it wants {needed(QUANTILES[-1])} answered requests"
    else:
        told = "not before the end" if back_s is None else f"after {back_s:.1f} s"
        latency = f"TTFT within 20% of the baseline's P{100 * at:g} {told}"
    return (
        f"capacity {measured.capacity_per_s:.2f} requests/s, "
        f"unloaded TTFT {ttft_ms:.0f} ms and TPOT {tpot_ms:.1f} ms\ngood: {timeline.slo}\n\n"
        f"{table(header, rows)}\n\nlevel 0 again {timeline.level_zero_s:.1f} s after the overload, {latency}"
    )


def plot(timeline: Timeline, path: Path) -> None:
    """Draw the timeline into a file, or raise OSError."""
    with styled():
        figure, (rates, latency, levels) = panels((10, 8), rows=3, sharex=True)
        starts = np.arange(0.0, timeline.run.until_s, _BUCKET_S).tolist()
        buckets = [timeline.between(start, start + _BUCKET_S) for start in starts]
        refused = [sum(one.outcome is Outcome.REFUSED for one in bucket) for bucket in buckets]
        for label, counts, colour in (
            ("offered", [len(bucket) for bucket in buckets], INK),
            ("good", [sum(map(timeline.slo.met_by, bucket)) for bucket in buckets], GREEN),
            ("refused", refused, RED),
        ):
            rates.step(starts, np.array(counts) / _BUCKET_S, where="post", label=label, color=colour)
        rates.set_ylabel("requests/s")
        rates.legend(loc="upper right")
        drawn = [
            (one.offered.planned_s, one.ttft_s) for one in timeline.run.requests if one.ttft_s is not None
        ]
        latency.scatter([at for at, _ in drawn], [ttft_s for _, ttft_s in drawn], s=5, color=BLUE)
        latency.axhline(drive.TTFT_SLO_S, color=INK, linewidth=0.8, linestyle="--")
        latency.set_ylabel("TTFT, s")
        at = [look.at_s for look in timeline.looks]
        levels.step(at, [look.level for look in timeline.looks], where="post", color=RED)
        levels.set_yticks(range(len(LEVELS)), LEVELS)
        levels.set(ylim=(-0.3, 4.3), xlabel="seconds")
        queue = levels.twinx()
        queue.plot(at, [look.waiting for look in timeline.looks], color=GREY, linewidth=0.8)
        queue.grid(visible=False)
        queue.set_ylabel("waiting")
        for panel in (rates, latency, levels):
            panel.axvspan(timeline.overload_from_s, timeline.overload_to_s, color="#f0e0d0", zorder=0)
        capacity = timeline.calibration.capacity_per_s
        rates.set_title(f"Overload and recovery: capacity {capacity:.1f} requests/s, good is {timeline.slo}")
        save(figure, path)
