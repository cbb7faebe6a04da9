"""`octavo tune`: finds the settings of a worker that serve most within a latency target."""

from __future__ import annotations

import argparse
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.cli import output
from octavo.cli.durations import duration
from octavo.steptimes import StepTimes, StepTimesError

from octavo_lab.command import BenchError, Flag, add_flags, claim_file

if TYPE_CHECKING:
    from octavo_lab.tune.search import Trial, TuningResult
    from octavo_lab.tune.target import LatencyTarget


def _listed(kind: type[int | float], most: float, what: str, text: str) -> list[Any]:
    """Read values with commas, in order; each is above 0, and no more than `most`."""
    try:
        values = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not 0 < values[0] <= values[-1] <= most:
        raise argparse.ArgumentTypeError(f"must be {what} with commas, got {text!r}")
    return values


_numbers = partial(_listed, int, math.inf, "numbers from 1 on")
_shares = partial(_listed, float, 1.0, "shares")
FLAGS: Final[tuple[Flag, ...]] = (
    ("--ttft", duration, None, "TIME", "target: time to the first token, such as 500ms"),
    ("--tpot", duration, None, "TIME", "target: time per output token after it, such as 50ms"),
    ("--percentile", float, 99.0, "P", "of the requests that must keep both"),
    ("--model", str, "demo", "MODEL", "as for `octavo up`"),
    ("--dataset", str, "azure-conv", "WHAT", "as for `octavo bench serve`"),
    ("--context", int, None, "N", "longest sequence that is asked for (default: the model's)"),
    ("--scale", int, None, "N", "divide the lengths of a trace by this"),
    ("--traces", Path, None, "DIR", "folder with other copies of the public traces"),
    ("--requests", int, None, "N", "of each trial (default: what the percentile wants, 500 for a P99)"),
    ("--max-num-seqs", _numbers, "4,8,16,32,64", "N,...", "to choose from"),
    ("--max-num-batched-tokens", _numbers, "128,256,512,1024,2048", "N,...", "to choose from"),
    ("--gpu-memory-utilization", _shares, None, "X,...", "the least that keeps the rate (default: as it is)"),
    ("--budget", duration, None, "TIME", "stop searching after this long"),
    ("--simulate", int, None, "BLOCKS", "in virtual time: a worker with so many KV blocks and --profile"),
    ("--profile", Path, None, "FILE", "step times for --simulate (default: demo, two cores)"),
    ("--seed", int, 1, "N", "of arrivals and requests"),
    ("--out", Path, None, "FILE", "write the settings as a TOML file for `--config-file`"),
)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    add_flags(parser, FLAGS)
    add = parser.add_argument
    add("--worker-arg", action="append", default=[], metavar="ARG", help="further argument of the worker")
    add("--json", action="store_true", help="print every trial as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Search, print the frontier and the settings; return the exit code.

    It is 1 when nothing keeps the target, and 130 after Ctrl-C, which ends the search with the best so far.
    """
    try:
        found, target, interrupted = _search(arguments)
    except ModuleNotFoundError as error:
        output.fail(f"octavo tune needs {error.name}: pip install 'octavo[bench,worker]'")
        return 1
    except BenchError as error:
        output.fail(str(error))
        return 2
    if arguments.json:
        print(output.to_json({"target": str(target), "best": found.best, "trials": found.trials}))
    else:
        _print(found, target, arguments.model)
    if found.best is None:
        return output.EXIT_INTERRUPTED if interrupted else 1
    if arguments.out is not None:
        try:
            arguments.out.write_text(as_toml(found.best, target), encoding="utf-8")
        except OSError as error:
            output.fail(f"{arguments.out}: {error.strerror}")
            return 1
        output.note(f"wrote {arguments.out}: octavo worker --config-file {arguments.out}")
    return output.EXIT_INTERRUPTED if interrupted else 0


def _search(arguments: argparse.Namespace) -> tuple[TuningResult, LatencyTarget, bool]:
    """Return what was found, for what, and whether Ctrl-C ended it."""
    from octavo_lab.tune.search import SettingsSearch, Space  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.tune.target import LatencyTarget  # noqa: PLC0415 # needs the extra `bench`

    if not 50 <= arguments.percentile < 100:
        raise BenchError(f"--percentile must be from 50 to below 100, got {arguments.percentile:g}")
    target = LatencyTarget(percentile=arguments.percentile, ttft_s=arguments.ttft, tpot_s=arguments.tpot)
    if arguments.ttft is None and arguments.tpot is None:
        raise BenchError("name a target: --ttft, --tpot, or both")
    requests = target.least_requests if arguments.requests is None else arguments.requests
    if requests < target.least_requests:
        raise BenchError(
            f"a P{arguments.percentile:g} wants {target.least_requests} requests per trial, got {requests}: "
            "raise --requests or lower --percentile"
        )
    space = Space(arguments.max_num_seqs, arguments.max_num_batched_tokens)
    middle = space.at(space.middle())
    if middle is None:
        raise BenchError("no choice of --max-num-batched-tokens has a token for each of --max-num-seqs")
    if arguments.out is not None:
        claim_file(arguments.out)
    interrupted = False
    give_up_at = math.inf if arguments.budget is None else time.monotonic() + arguments.budget
    with _trials(arguments, target, requests) as trials:
        # A guess: what the middle of the space serves when all come at once; where it is cheap, any.
        measure = getattr(trials, "measure_rate", None)
        rate = 1.0 if measure is None else 0.5 * measure(middle, min(64, requests))
        search = SettingsSearch(space, trials, rate, _tell, lambda: time.monotonic() < give_up_at)
        try:
            search.run()
            search.lowest_memory(arguments.gpu_memory_utilization or ())
        except KeyboardInterrupt:
            output.note("stopping: this is the best so far")
            interrupted = True
    return search.found, target, interrupted


def _trials(arguments: argparse.Namespace, target: LatencyTarget, requests: int) -> Any:
    """Return what tries settings, as a context: a stack of its own, or virtual time."""
    if arguments.simulate is None:
        from octavo_lab.tune.served import ServedTrials  # noqa: PLC0415 # needs the extra `bench`

        return ServedTrials(arguments, target, requests)
    from octavo_lab.datasets.lengths import of_trace, window  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.fleet.arms import STANDARD_FLEET  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.traces import TRACES  # noqa: PLC0415 # needs the extra `bench`
    from octavo_lab.tune.simulated import SimulatedTrials  # noqa: PLC0415 # needs the extra `bench`

    try:
        times = StepTimes.builtin() if arguments.profile is None else StepTimes.load(arguments.profile)
    except StepTimesError as error:
        raise BenchError(str(error)) from None
    if arguments.dataset not in TRACES:
        raise BenchError(f"a simulation takes the lengths of a trace ({', '.join(TRACES)})")
    worker = replace(STANDARD_FLEET.worker, num_blocks=arguments.simulate, step_times=times)
    context = arguments.context or worker.max_model_len
    trace = of_trace(arguments.dataset, context, scale=arguments.scale, folder=arguments.traces)
    asked = window(trace.arrivals, requests, arguments.seed)
    lengths = [(one.prompt_tokens, one.output_tokens) for one in asked]
    return nullcontext(SimulatedTrials(worker, lengths, target, arguments.seed))


def _tell(trial: Trial) -> None:
    verdict = "kept" if trial.kept else "missed"
    early = f" after {trial.requests} requests" if trial.stopped_early else ""
    output.note(f"{trial.settings}: {trial.rate_per_s:.2f} requests/s {verdict}{early}")


def _print(found: TuningResult, target: LatencyTarget, model: str) -> None:
    best = found.best
    if best is None:
        output.fail(f"no settings keep {target}, at however low a rate: see the trials above")
        return
    rows = [
        (
            trial.settings.max_num_seqs,
            trial.settings.max_num_batched_tokens,
            trial.settings.gpu_memory_utilization or "",
            f"{trial.rate_per_s:.2f}",
            "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:.0f}",
            *("" if value is None else output.duration(value) for value in (trial.ttft_s, trial.tpot_s)),
        )
        for trial in found.frontier()
    ]
    latencies = (f"P{target.percentile:g} {name}" for name in ("TTFT", "TPOT"))
    header = ("max_num_seqs", "max_num_batched_tokens", "memory", "requests/s", "tokens/s", *latencies)
    print(output.paint(f"Frontier ({len(found.trials)} trials; {target})", "cyan"))
    print(output.table(header, rows, right=range(len(header))))
    print()
    print(f"Best: {best.settings} at {best.rate_per_s:.2f} requests/s.")
    if best.memory_short:
        print("Requests were preempted: more KV memory would help.")
    for serve in ("octavo worker --model", "vllm serve"):
        print(output.paint(f"  {serve} {model} {' '.join(best.settings.flags)}", "bold"))


def as_toml(best: Trial, target: LatencyTarget) -> str:
    """Return settings as a file for `octavo worker --config-file`."""
    lines = [f"# octavo tune: {best.rate_per_s:.2f} requests/s within {target}", "[worker]"]
    lines += (f"{name} = {value}" for name, value in best.settings.named.items())
    return "\n".join(lines) + "\n"
