"""`octavo bench ladder`: static against continuous, contiguous against paged, under the same traffic."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from octavo.cli import output
from octavo.cli.durations import duration

from octavo_lab.command import BenchError, BenchInterrupted, claim_folder

if TYPE_CHECKING:
    from octavo_lab.ladder.config import LadderConfig
    from octavo_lab.ladder.experiment import Experiment


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; what is not given is the preset's."""
    add = parser.add_argument
    add("--preset", choices=("quick", "full"), default="quick", help="how much to measure (default: quick)")
    add("--out", type=Path, metavar="DIR", help="folder of the experiment (default: octavo-ladder-DATE)")
    add("--resume", type=Path, metavar="DIR", help="go on with the experiment in a folder, as it was begun")
    add("--report-only", type=Path, metavar="DIR", help="measure nothing, write the report of a folder anew")
    add("--budget", type=duration, metavar="TIME", help="how long it may take, such as 40m or 2h")
    add("--repeats", type=int, metavar="N", help="times that each cell is run; a budget may lower it to 2")
    add("--arms", metavar="NAME,...", help="arms, see docs/ladder.md (default: quick 2, full all 8)")
    add("--rungs", metavar="NAME,...", help="loads, see docs/ladder.md (default: quick 2, full all 5)")
    add("--seed", type=int, metavar="N", help="of arrivals and requests (default: 1)")
    add("--arrivals", choices=("poisson", "gamma", "bursty"), help="how requests come (default: poisson)")
    add("--model", help="as for `octavo up` (default: demo)")
    add("--runner", choices=("torch", "vllm", "sim"), help="backend of the workers (default: torch)")
    add("--dataset", metavar="WHAT", help="where lengths come from, see docs/ladder.md")
    add("--traces", metavar="DIR", help="folder of the public traces")
    add("--context", type=int, metavar="N", help="longest sequence, in tokens (default: 512)")
    add(
        "--scale",
        type=int,
        metavar="N",
        help="divide the lengths of a trace by this (default: 16)",
    )
    add("--num-blocks", type=int, metavar="N", help="KV blocks, of all arms (default: 768)")
    add("--block-size", type=int, metavar="N", help="tokens of a block (default: 4)")
    add("--max-num-seqs", type=int, metavar="N", help="of all workers (default: 64)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="of all workers (default: 512)")
    add("--queue-timeout", type=float, metavar="S", help="longest wait in the queue (default: 30)")
    add(
        "--slo",
        metavar="ttft=MS,tpot=MS,e2e=MS",
        help="what a request must keep to count as good (default: ttft=3000,tpot=500)",
    )
    add("--price-per-hour", type=float, metavar="X", help="of this machine, in any currency (default: 1)")
    add("--worker-arg", action="append", metavar="ARG", help="further argument of each worker")
    add("--scheduler-arg", action="append", metavar="ARG", help="further argument of each scheduler")


def run(arguments: argparse.Namespace) -> str:
    """Measure, write the report, return its summary.

    Raises:
        BenchError: the arguments are wrong, a stack does not start, or the search fails.
        BenchInterrupted: asked to stop; the report of what was measured until then has been written.
    """
    # Not earlier: they need the extra `bench`, and the help does not.
    from octavo_lab.ladder.experiment import Experiment, config_of  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.ladder.workload import Workload  # noqa: PLC0415 # needs the extra `bench`

    began_before: Path | None = arguments.resume or arguments.report_only
    if began_before is not None:
        folder, config = began_before, config_of(began_before)
    else:
        folder = arguments.out or Path(time.strftime("octavo-ladder-%Y%m%d-%H%M%S"))
        config = _config(arguments)
        if (folder / "config.json").exists():
            raise BenchError(
                f"{folder} holds an experiment: go on with it with --resume, or name another --out"
            )
    claim_folder(folder)
    with _Progress() as show:
        experiment = Experiment(config, folder, Workload(config), show.tell)
        if arguments.report_only is None:
            _measure(experiment)
    return _report(experiment)


def _measure(experiment: Experiment) -> None:
    """Run; when that is ended early, write what there is before the error goes on its way."""
    former = signal.signal(signal.SIGTERM, _on_signal)
    resume = f"go on with it: octavo bench ladder --resume {experiment.folder}"
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


def _on_signal(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _report(experiment: Experiment) -> str:
    from octavo_lab.ladder.explain import headlines  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.ladder.report import make_report, write  # noqa: PLC0415 # needs the extra `bench`

    report = make_report(experiment.measured())
    rows = [
        (one.what, one.measured, one.target, {None: "", True: "met", False: "missed"}[one.met], one.article)
        for one in headlines(report)
    ]
    table = output.table(("", "measured", "target", "", "articles"), rows)
    try:
        paths = write(report, experiment.folder)
    except OSError as error:
        raise BenchError(f"{experiment.folder}: {error.strerror}", partial=table) from error
    return "\n".join([table, "", *(f"wrote {path}" for path in paths)])


def _config(arguments: argparse.Namespace) -> LadderConfig:
    from octavo_lab.ladder.arms import ARMS  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.ladder.config import PRESETS, RUNGS  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.serve.plan import parse_slo  # noqa: PLC0415 # needs the extra `bench`

    given = {
        "budget_s": arguments.budget,
        "repeats": arguments.repeats,
        "arms": None if arguments.arms is None else tuple(arguments.arms.split(",")),
        "rungs": None if arguments.rungs is None else tuple(arguments.rungs.split(",")),
        "seed": arguments.seed,
        "arrivals": arguments.arrivals,
        "model": arguments.model,
        "runner": arguments.runner,
        "dataset": arguments.dataset,
        "traces": arguments.traces,
        "context": arguments.context,
        "scale": arguments.scale,
        "num_blocks": arguments.num_blocks,
        "block_size": arguments.block_size,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "queue_timeout_s": arguments.queue_timeout,
        "slo": arguments.slo,
        "price_per_hour": arguments.price_per_hour,
        "extra_worker_args": tuple(arguments.worker_arg or ()) or None,
        "extra_scheduler_args": tuple(arguments.scheduler_arg or ()) or None,
    }
    config = replace(
        PRESETS[arguments.preset], **{name: value for name, value in given.items() if value is not None}
    )
    for what, given_names, known in (("arm", config.arms, ARMS), ("rung", config.rungs, RUNGS)):
        for name in given_names:
            if name not in known:
                raise BenchError(f"no {what} {name!r}: there are {', '.join(known)}")
    parse_slo(config.slo)
    for name, value in given.items():
        if isinstance(value, int | float) and name != "seed" and not value > 0:
            raise BenchError(f"{name} must be positive, got {value:g}")
    return config


class _Progress(output.ProgressLine):
    """What runs, how far all of it is, and how long it will take."""

    def tell(self, what: str, fraction: float, left_s: float | None) -> None:
        """Tell that `what` begins."""
        late = left_s is None or left_s <= 0
        left = "" if late else f"{output.duration(left_s or 0.0)} left · "
        super().__call__(f"{left}{what}", fraction)
