"""`octavo status`: what a scheduler is doing."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

from octavo.cli import output, request
from octavo.cli.dashboard import LEVEL_COLOURS, LEVELS, control_loop
from octavo.client import Client
from octavo.sampling import SCALARS
from octavo.status import HistoryPoint, OverloadStatus, Status

_STATE_COLOURS: Final = {
    "ready": "green",
    "draining": "yellow",
    "connecting": "yellow",
    "held": "yellow",
    "lost": "red",
}
_MAX_POINTS: Final = 300
# The other screen of the terminal, where long lines are cut, without a cursor.
_OPEN_SCREEN: Final = "\x1b[?1049h\x1b[?7l\x1b[?25l"
_CLOSE_SCREEN: Final = "\x1b[?25h\x1b[?7h\x1b[?1049l"


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=1.0,
        metavar="S",
        help="show it again each S seconds (default: 1), until interrupted",
    )
    request.add_endpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    with request.connect(arguments) as client:
        if arguments.json:
            return _print_json(arguments.watch, client)
        if not sys.stdout.isatty():
            statuses = [client.status()] if arguments.watch is None else client.watch_status(arguments.watch)
            for status in statuses:
                print(show(status), flush=True)
            return 0
        if arguments.watch is None:
            status = client.status(history=True)
            print(show(status, status.history))
            return 0
        _follow(client, arguments.watch)
    return 0


def _print_json(watch: float | None, client: Client) -> int:
    if watch is None:
        print(output.to_json(client.status(history=True)))
        return 0
    for status in client.watch_status(watch, history=True):
        print(output.to_json(status), flush=True)
    return 0


def _follow(client: Client, interval: float) -> None:
    """Show the status on the whole terminal, and leave that as it was."""
    points: deque[HistoryPoint] = deque(maxlen=_MAX_POINTS)
    sys.stdout.write(_OPEN_SCREEN)
    try:
        for status in client.watch_status(interval, history=True):
            points.extend(status.history)
            height = shutil.get_terminal_size((100, 40)).lines
            lines = show(status, tuple(points)).splitlines()[: height - 1]
            # Line by line over what was there: clearing it all first would flicker.
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
    finally:
        sys.stdout.write(_CLOSE_SCREEN)
        sys.stdout.flush()


def show(status: Status, points: Sequence[HistoryPoint] | None = None) -> str:
    """Return a status as people read it; with points of its history, as they look at it."""
    state = "draining" if status.draining else f"level {status.level} ({LEVELS[status.level]})"
    colour = "yellow" if status.draining else LEVEL_COLOURS[status.level]
    name = output.paint(status.scheduler_id, "bold")
    up, version = output.duration(status.uptime_s), status.version
    live, arrivals, speed = status.live_requests, status.arrivals, status.rates.requests_per_s
    lines = [
        f"scheduler {name}  {output.paint(state, colour)}  up {up}  version {version}{_pair(status)}",
        f"requests  {live} live, {arrivals} so far, {speed:.1f} per second",
    ]
    lines += _rates(status) if points is None else ["", control_loop(status, points)]
    lines += [_pressure(one) for one in status.overload]
    if status.key_file_problem is not None:
        problem = f"key file  cannot be used, the last good one is in force: {status.key_file_problem}"
        lines.append(output.paint(problem, "red"))
    if status.log_lines_dropped:
        lines.append(output.paint(f"log       {status.log_lines_dropped} lines could not be written", "red"))
    if status.plan_log is not None and status.plan_log.entries_missed:
        now = f", and none is: {status.plan_log.problem}" if status.plan_log.problem else ""
        missed = f"plan log  {status.plan_log.entries_missed} entries could not be written{now}"
        lines.append(output.paint(missed, "red"))
    if status.rss_bytes >= status.max_rss_bytes > 0:
        mib = f"{status.rss_bytes >> 20} of {status.max_rss_bytes >> 20} MiB"
        lines.append(output.paint(f"memory  {mib}: new requests are refused", "red"))
    lines += ["", _workers(status), *_devices(status)]
    lines += [*_holders(status), *_limits(status), *_models(status)]
    if status.tenants and [tenant.tenant for tenant in status.tenants] != ["anonymous"]:
        lines += ["", _tenants(status)]
    if status.pins:
        lines += ["", _pins(status)]
    if any(queue.waiting for queue in status.queues):
        lines += ["", _queues(status)]
    if status.outcomes:
        ended = sorted(status.outcomes.items(), key=lambda item: -item[1])
        lines += ["", "ended     " + ", ".join(f"{count} {reason}" for reason, count in ended)]
    return "\n".join(lines)


def _pair(status: Status) -> str:
    """How it stands to another scheduler of the same workers, if there is one."""
    if status.standby is not None:
        return f"  rank {status.rank}, {status.standby or 'another'} stands by"
    return f"  rank {status.rank}" if status.rank else ""


def _rates(status: Status) -> list[str]:
    rates, duration = status.rates, output.duration
    ttft, ttft_p99 = duration(rates.ttft_p50_s), duration(rates.ttft_p99_s)
    queued, queued_p99 = duration(rates.queue_p50_s), duration(rates.queue_p99_s)
    lines = [
        f"tokens    {rates.prompt_tokens_per_s:.0f} in and {rates.output_tokens_per_s:.0f} out per second",
        f"waiting   first token after {ttft}, P99 {ttft_p99}; queued {queued}, P99 {queued_p99}",
        f"pace      {duration(rates.itl_p50_s)} per token, P99 {duration(rates.itl_p99_s)}",
    ]
    if rates.refused_per_s:
        lines.append(f"refused   {rates.refused_per_s:.1f} per second")
    if rates.cost_per_1k_tokens is not None:
        lines.append(f"cost      {rates.cost_per_1k_tokens:.4f} per 1000 tokens")
    return lines


def _pressure(overload: OverloadStatus) -> str:
    """What leads to the level of a model, as shares of what is bearable."""
    inputs = (
        f"backlog {overload.backlog:.0%}, wait {overload.wait:.0%}, "
        f"blocks {overload.blocks:.0%}, missed deadlines {overload.misses:.0%}"
    )
    if overload.stalled_s >= 1:
        inputs += f", no report for {output.duration(overload.stalled_s)}"
    line = f"pressure  {overload.model}: {inputs}"
    if overload.predicted_ttft_s is not None:
        line += f"; first token expected after {output.duration(overload.predicted_ttft_s)}"
    if overload.half_open:
        line += "; half open"
    return output.paint(line, LEVEL_COLOURS[overload.level]) if overload.level else line


def _workers(status: Status) -> str:
    rows = [
        (
            worker.worker_id,
            worker.model,
            worker.runner,
            worker.state,
            f"{worker.running}/{worker.max_num_seqs}",
            f"{worker.step_s * 1000:.1f} ms",
            f"{worker.pool.active}/{worker.pool.total}",
            worker.pool.evictable,
            f"{_hit_share(worker.pool.hit_tokens, worker.pool.miss_tokens):.0%}",
            f"{worker.bubble_share:.1%}",
        )
        for worker in status.workers
    ]
    if not rows:
        return output.paint("no workers", "red")
    header = ("WORKER", "MODEL", "RUNNER", "STATE", "RUNNING", "STEP", "BLOCKS", "CACHED", "HITS", "BUBBLE")
    text = output.table(header, rows, right=(4, 5, 6, 7, 8, 9))
    for state, colour in _STATE_COLOURS.items():
        text = text.replace(f" {state} ", f" {output.paint(state, colour)} ")
    return text


def _holders(status: Status) -> list[str]:
    """Which other schedulers hold workers, and which."""
    workers: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.held_by:
            holder = f"{worker.held_by} {worker.held_by_endpoint}".strip()
            workers.setdefault(holder, []).append(worker.worker_id)
    return [f"held      by {holder}: {', '.join(names)}" for holder, names in workers.items()]


def _limits(status: Status) -> list[str]:
    """How the workers' limits came about; workers of which the same is to be said share a line."""
    workers: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.limits_reason:
            workers.setdefault(worker.limits_reason, []).append(worker.worker_id)
    return [f"limits    {reason}: {', '.join(names)}" for reason, names in workers.items()]


def _models(status: Status) -> list[str]:
    """What requests get that leave sampling open, and by which other names they may ask for a model."""
    lines = []
    for model in status.models:
        said = ", ".join(
            f"{name} {value:g}"
            for name, value in model.generation_defaults.items()
            if value != SCALARS[name].neutral or name == "temperature"
        )
        lines.append(f"defaults  {model.id}: {said}")
        if model.aliases:
            lines.append(f"names     {model.id}: also {', '.join(model.aliases)}")
    return lines


def _queues(status: Status) -> str:
    rows = [
        (
            queue.model,
            queue.priority.name.lower() if queue.priority is not None else "unknown",
            queue.waiting,
            queue.waiting_tokens,
            output.duration(queue.oldest_wait_s),
        )
        for queue in status.queues
        if queue.waiting
    ]
    return output.table(("QUEUE", "CLASS", "WAITING", "TOKENS", "OLDEST"), rows, right=(2, 3, 4))


def _pins(status: Status) -> str:
    rows = [(pin.name, pin.model, pin.blocks, ", ".join(pin.workers) or "none") for pin in status.pins]
    return output.table(("PIN", "MODEL", "BLOCKS", "KEPT ON"), rows, right=(2,))


def _tenants(status: Status) -> str:
    total_s = _device_s(status)
    rows = [
        (
            one.tenant,
            f"{one.weight:g}",
            f"{one.requests_in_flight}{_of(one.quotas.requests_in_flight)}",
            f"{one.waiting_requests}{_of(one.quotas.waiting_requests)}",
            one.arrivals,
            one.over_quota,
            one.prompt_tokens,
            one.output_tokens,
            output.duration(one.device_s),
            f"{one.device_s / total_s:.1%}" if total_s else "",
        )
        for one in status.tenants
    ]
    header = (
        "TENANT",
        "WEIGHT",
        "LIVE",
        "WAITING",
        "ARRIVALS",
        "OVER QUOTA",
        "TOKENS IN",
        "OUT",
        "DEVICE",
        "",
    )
    return output.table(header, rows, right=tuple(range(1, len(header))))


def _device_s(status: Status) -> float:
    """Return the time that devices were attached."""
    used_s = sum(tenant.device_s for tenant in status.tenants)
    return used_s + status.idle_device_s + status.unassigned_device_s


def _devices(status: Status) -> list[str]:
    """How much of their time the devices were of use."""
    total_s = _device_s(status)
    if not total_s:
        return []
    idle = f"{output.duration(status.idle_device_s)} ({status.idle_device_s / total_s:.0%})"
    line = f"devices   {output.duration(total_s)} in all, idle for {idle}"
    if status.unassigned_device_s:
        line += f", {output.duration(status.unassigned_device_s)} for nobody"
    return [line]


def _of(limit: int | None) -> str:
    return f"/{limit}" if limit is not None else ""


def _hit_share(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else 0.0
