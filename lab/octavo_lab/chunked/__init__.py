"""`octavo bench chunked`: what chunked prefill spares running requests while long prompts arrive."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.cli import output

from octavo_lab.command import BenchError

if TYPE_CHECKING:
    from octavo_lab.chunked.experiment import Comparison


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--model", default="demo", help="as for `octavo up` (default: demo)")
    for flag, default, what in (
        ("--long-tokens", 2048, "tokens of each long prompt"),
        ("--requests", 510, "short requests of each arm, in all its turns; a P99 wants 500"),
        ("--repeats", 3, "turns of each arm"),
        ("--concurrency", 16, "short requests that run at any time"),
        ("--prompt-tokens", 8, "of a short request"),
        ("--output-tokens", 4, "of a short request"),
        ("--every", 170, "short requests that end from one long prompt to the next"),
        ("--max-num-batched-tokens", 512, "tokens in a step: the size of the chunks"),
        ("--seed", 1, "of the prompts"),
    ):
        told = f"{what} (default {default})"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=told)
    parser.add_argument(
        "--worker-arg", action="append", default=[], metavar="ARG", help="further argument of both workers"
    )
    parser.add_argument(
        "--scheduler-arg", action="append", default=[], metavar="ARG", help="the same for both schedulers"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> str:
    """Measure; return the table.

    Raises:
        BenchError: it cannot be done as asked, or a stack does not start.
    """
    # Not earlier: it needs the extra `bench`, and the help does not.
    from octavo.stack import StackError  # noqa: PLC0415

    from octavo_lab.chunked.experiment import ChunkedConfig, measure  # noqa: PLC0415

    config = ChunkedConfig(
        model=arguments.model,
        long_tokens=arguments.long_tokens,
        requests=arguments.requests,
        repeats=arguments.repeats,
        concurrency=arguments.concurrency,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        every=arguments.every,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        worker_args=tuple(arguments.worker_arg),
        scheduler_args=tuple(arguments.scheduler_arg),
        seed=arguments.seed,
    )
    try:
        with output.ProgressLine() as progress:
            found = asyncio.run(measure(config, progress))
    except StackError as error:
        raise BenchError(str(error)) from error
    return json.dumps(as_json(found), indent=2) if arguments.json else as_text(found)


def as_json(found: Comparison) -> dict[str, Any]:
    """Return both arms in figures."""
    from octavo_lab.load.statistics import distribution  # noqa: PLC0415

    ratio = found.ratio
    return {
        "config": asdict(found.config),
        "arms": {
            name: {
                "short_requests": len(arm.gaps_s),
                "long_prompts": len(arm.long_ttft_s),
                "failed": arm.failed,
                "itl_s": asdict(arm.itl_s),
                "long_ttft_s": asdict(distribution(arm.long_ttft_s)),
            }
            for name, arm in found.arms.items()
        },
        "itl_p99_ratio": None if ratio is None else asdict(ratio),
    }


def as_text(found: Comparison) -> str:
    """Return both arms as a table."""
    from octavo_lab.load.statistics import distribution  # noqa: PLC0415
    from octavo_lab.load.tables import milliseconds  # noqa: PLC0415

    config, rows = found.config, []
    for name, arm in found.arms.items():
        itl, long = arm.itl_s, distribution(arm.long_ttft_s)
        figures = (itl.p50, itl.p90, itl.p99, itl.max, long.p50)
        counts = (len(arm.gaps_s), len(arm.long_ttft_s), arm.failed)
        rows.append([name, *counts, *map(milliseconds, figures)])
    header = ["prefill", "short", "long", "failed", "ITL P50", "P90", "P99", "max", "long TTFT P50"]
    traffic = (
        f"{config.concurrency} short requests ({config.prompt_tokens} in, {config.output_tokens} out) run at "
        f"any time. A prompt of {config.long_tokens} tokens comes each time that {config.every} of them have "
        f"ended. Steps of {config.max_num_batched_tokens} tokens, "
        f"{config.repeats} turns each.\nInter-token latency (ITL) of the short requests, in ms:"
    )
    parts = [traffic, output.table(header, rows, right=range(1, len(header)))]
    ratio = found.ratio
    if ratio is None:
        parts.append("Too few requests for a P99: it wants 500 of each arm.")
    else:
        bounds = f"95% interval {ratio.low:.3f} to {ratio.high:.3f}"
        parts.append(f"P99 with chunks over P99 without: {ratio.value:.3f} ({bounds})")
    return "\n\n".join(parts)
