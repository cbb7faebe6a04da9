"""`octavo status`: what a scheduler is doing."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from octavo.cli import output, request
from octavo.status import Status

LEVELS: Final = ("normal", "trim", "shed batch", "shed standard", "open")
_LEVEL_COLOURS: Final = ("green", "yellow", "yellow", "red", "red")
_STATE_COLOURS: Final = {"ready": "green", "draining": "yellow", "connecting": "yellow", "lost": "red"}


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
    render = output.to_json if arguments.json else show
    with request.connect(arguments) as client:
        if arguments.watch is None:
            print(render(client.status()))
            return 0
        clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not arguments.json else ""
        for status in client.watch_status(arguments.watch):
            print(f"{clear}{render(status)}", flush=True)
    return 0


def show(status: Status) -> str:
    """Return a status as people read it."""
    state = "draining" if status.draining else f"level {status.level} ({LEVELS[status.level]})"
    colour = "yellow" if status.draining else _LEVEL_COLOURS[status.level]
    rates = status.rates
    name = output.paint(status.scheduler_id, "bold")
    up, version = output.duration(status.uptime_s), status.version
    live, arrivals, speed = status.live_requests, status.arrivals, rates.requests_per_s
    tokens_in, tokens_out = rates.prompt_tokens_per_s, rates.output_tokens_per_s
    ttft, ttft_p99 = output.duration(rates.ttft_p50_s), output.duration(rates.ttft_p99_s)
    queued, queued_p99 = output.duration(rates.queue_p50_s), output.duration(rates.queue_p99_s)
    lines = [
        f"scheduler {name}  {output.paint(state, colour)}  up {up}  version {version}",
        f"requests  {live} live, {arrivals} so far, {speed:.1f} per second",
        f"tokens    {tokens_in:.0f} in and {tokens_out:.0f} out per second",
        f"waiting   first token after {ttft}, P99 {ttft_p99}; queued {queued}, P99 {queued_p99}",
    ]
    if rates.cost_per_1k_tokens is not None:
        lines.append(f"cost      {rates.cost_per_1k_tokens:.4f} per 1000 tokens")
    if status.key_file_problem is not None:
        lines.append(
            output.paint(f"key file  cannot be used, the last good one is: {status.key_file_problem}", "red")
        )
    lines += ["", _workers(status)]
    if status.tenants and [tenant.tenant for tenant in status.tenants] != ["anonymous"]:
        lines += ["", _tenants(status)]
    if any(queue.waiting for queue in status.queues):
        lines += ["", _queues(status)]
    if status.outcomes:
        ended = sorted(status.outcomes.items(), key=lambda item: -item[1])
        lines += ["", "ended     " + ", ".join(f"{count} {reason}" for reason, count in ended)]
    return "\n".join(lines)


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


def _queues(status: Status) -> str:
    rows = [
        (
            queue.model,
            queue.priority.name.lower(),
            queue.waiting,
            queue.waiting_tokens,
            output.duration(queue.oldest_wait_s),
        )
        for queue in status.queues
        if queue.waiting
    ]
    return output.table(("QUEUE", "CLASS", "WAITING", "TOKENS", "OLDEST"), rows, right=(2, 3, 4))


def _tenants(status: Status) -> str:
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
        )
        for one in status.tenants
    ]
    header = ("TENANT", "WEIGHT", "LIVE", "WAITING", "ARRIVALS", "OVER QUOTA", "TOKENS IN", "OUT")
    return output.table(header, rows, right=(1, 2, 3, 4, 5, 6, 7))


def _of(limit: int | None) -> str:
    return f"/{limit}" if limit is not None else ""


def _hit_share(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else 0.0
