"""`octavo bench ladder`: static against continuous, contiguous against paged, under the same traffic."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octavo.cli import output
from octavo.cli.durations import duration

from octavo_lab.command import BenchError, BenchInterrupted, claim_folder
from octavo_lab.ladder.config import ARMS, PRESETS, RUNGS, LadderConfig
from octavo_lab.ladder.experiment import Experiment, LadderRecord
from octavo_lab.ladder.pages import headlines, write
from octavo_lab.ladder.report import make_report
from octavo_lab.ladder.workload import Workload
from octavo_lab.report import table
from octavo_lab.serve.plan import parse_slo
from octavo_lab.stored import read_record

_SLO: Final = "ttft=MS,tpot=MS,e2e=MS"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


SETTINGS: Final[tuple[tuple[str, str, Any, str | None, str], ...]] = (
    ("budget_s", "--budget", duration, "TIME", "how long it may take, such as 40m or 2h"),
    ("repeats", "--repeats", int, "N", "times that each cell is run; a budget may lower it to 2"),
    ("arms", "--arms", _names, "NAME,...", "arms, see docs/ladder.md (default: quick 2, full all 8)"),
    ("rungs", "--rungs", _names, "NAME,...", "loads, see docs/ladder.md (default: quick 2, full all 5)"),
    ("seed", "--seed", int, "N", "of arrivals and requests (default: 1)"),
    ("arrivals", "--arrivals", ("poisson", "gamma", "bursty"), None, "how requests come (default: poisson)"),
    ("model", "--model", str, "MODEL", "as for `octavo up` (default: demo)"),
    ("runner", "--runner", ("torch", "vllm", "sim"), None, "backend of the workers (default: torch)"),
    ("dataset", "--dataset", str, "WHAT", "where lengths come from, see docs/ladder.md"),
    ("traces", "--traces", str, "DIR", "folder of the public traces"),
    ("context", "--context", int, "N", "longest sequence, in tokens (default: 512)"),
    ("scale", "--scale", int, "N", "divide the lengths of a trace by this (default: 16)"),
    ("num_blocks", "--num-blocks", int, "N", "KV blocks, of all arms (default: 768)"),
    ("block_size", "--block-size", int, "N", "tokens of a block (default: 4)"),
    ("max_num_seqs", "--max-num-seqs", int, "N", "of all workers (default: 64)"),
    ("max_num_batched_tokens", "--max-num-batched-tokens", int, "N", "of all workers (default: 512)"),
    ("queue_timeout_s", "--queue-timeout", float, "S", "longest wait in the queue (default: 30)"),
    ("slo", "--slo", str, _SLO, "what a request must keep to count as good (default: ttft=3000,tpot=500)"),
    ("price_per_hour", "--price-per-hour", float, "X", "of this machine, in any currency (default: 1)"),
)
"""Field of `LadderConfig`, flag, type or choices, metavar, help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; what is not given is the preset's."""
    add = parser.add_argument
    add("--preset", choices=("quick", "full"), default="quick", help="how much to measure (default: quick)")
    add("--out", type=Path, metavar="DIR", help="folder of the experiment (default: octavo-ladder-DATE)")
    add("--resume", type=Path, metavar="DIR", help="go on with the experiment in a folder, as it was begun")
    add("--report-only", type=Path, metavar="DIR", help="measure nothing, write the report of a folder anew")
    for field, flag, kind, metavar, told in SETTINGS:
        accepted = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": metavar}
        add(flag, dest=field, help=told, **accepted)
    add("--worker-arg", action="append", metavar="ARG", help="further argument of each worker")
    add("--scheduler-arg", action="append", metavar="ARG", help="further argument of each scheduler")


def run(arguments: argparse.Namespace) -> str:
    """Measure, write the report (of what there is, when asked to stop), return its summary."""
    folder: Path | None = arguments.resume or arguments.report_only
    if folder is not None:
        config = read_record(folder / "config.json", LadderRecord).config
    else:
        folder = arguments.out or Path(time.strftime("octavo-ladder-%Y%m%d-%H%M%S"))
        config = _config(arguments)
        if (folder / "config.json").exists():
            told = "holds an experiment: go on with it with --resume, or name another --out"
            raise BenchError(f"{folder} {told}")
    claim_folder(folder)
    with output.ProgressLine() as line:

        def show(what: str, fraction: float, left_s: float | None) -> None:
            left = f"{output.duration(left_s)} left · " if left_s is not None and left_s > 0 else ""
            line(f"{left}{what}", fraction)

        experiment = Experiment(config, folder, Workload(config), show)
        if arguments.report_only is None:
            _measure(experiment)
    return _report(experiment)


def _measure(experiment: Experiment) -> None:
    """Run; when that is ended early, write what there is before the error goes on its way."""
    resume = f"go on with it: octavo bench ladder --resume {experiment.folder}"
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        experiment.run()
    except KeyboardInterrupt:
        partial = f"{_report(experiment)}\n" if experiment.measured().results else ""
        raise BenchInterrupted(f"{partial}{resume}") from None
    except BenchError:
        if experiment.measured().results:
            output.note(_report(experiment))
        output.note(resume)
        raise
    finally:
        signal.signal(signal.SIGTERM, former)


def _report(experiment: Experiment) -> str:
    report, met = make_report(experiment.measured()), {None: "", True: "met", False: "missed"}
    rows = [(*told, met[kept], article) for *told, article, kept in headlines(report)]
    told = table(("", "measured", "target", "", "articles"), rows)
    try:
        paths = write(report, experiment.folder)
    except OSError as error:
        raise BenchError(f"{experiment.folder}: {error.strerror}", partial=told) from error
    return "\n".join([told, "", *(f"wrote {path}" for path in paths)])


def _config(arguments: argparse.Namespace) -> LadderConfig:
    given = {field: getattr(arguments, field) for field, *_ in SETTINGS}
    given["extra_worker_args"] = tuple(arguments.worker_arg or ()) or None
    given["extra_scheduler_args"] = tuple(arguments.scheduler_arg or ()) or None
    given = {field: value for field, value in given.items() if value is not None}
    config = replace(PRESETS[arguments.preset], **given)
    for what, named, known in (("arm", config.arms, ARMS), ("rung", config.rungs, RUNGS)):
        for name in named:
            if name not in known:
                raise BenchError(f"no {what} {name!r}: there are {', '.join(known)}")
    parse_slo(config.slo)
    for field, value in given.items():
        if isinstance(value, int | float) and field != "seed" and not value > 0:
            raise BenchError(f"{field} must be positive, got {value:g}")
    return config
