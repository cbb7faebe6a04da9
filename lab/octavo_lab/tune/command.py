"""`octavo tune`: finds the settings of a worker that serve most within a latency target."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import output
from octavo.cli.durations import duration
from octavo.steptimes import StepTimes, StepTimesError

from octavo_lab.command import BenchError, claim_file

if TYPE_CHECKING:
    from octavo_lab.tune.search import Settings, Trial, TuningResult
    from octavo_lab.tune.target import LatencyTarget


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    add = parser.add_argument
    add("--ttft", type=duration, metavar="TIME", help="target: time to the first token, such as 500ms")
    add("--tpot", type=duration, metavar="TIME", help="target: time per output token after it, such as 50ms")
    add(
        "--percentile",
        type=float,
        default=99.0,
        metavar="P",
        help="of the requests that must keep both (default: 99)",
    )
    add("--model", default="demo", help="as for `octavo up` (default: demo)")
    add("--dataset", default="azure-conv", metavar="WHAT", help="as for `octavo bench serve`")
    add("--context", type=int, metavar="N", help="longest sequence that is asked for (default: the model's)")
    add("--scale", type=int, metavar="N", help="divide the lengths of a trace by this")
    add("--traces", type=Path, metavar="DIR", help="folder with other copies of the public traces")
    add(
        "--requests",
        type=int,
        metavar="N",
        help="of each trial (default: as many as the percentile wants, 500 for a P99)",
    )
    add("--max-num-seqs", default="4,8,16,32,64", metavar="N,...", help="to choose from")
    add("--max-num-batched-tokens", default="128,256,512,1024,2048", metavar="N,...", help="to choose from")
    add(
        "--gpu-memory-utilization",
        default="",
        metavar="X,...",
        help="to choose from, the least that keeps the rate; by default it is left as it is",
    )
    add("--budget", type=duration, metavar="TIME", help="stop searching after this long")
    add(
        "--simulate",
        type=int,
        metavar="BLOCKS",
        help="in virtual time: a worker with so many KV blocks and the step times of --profile",
    )
    add("--profile", type=Path, metavar="FILE", help="step times for --simulate (default: demo, two cores)")
    add("--seed", type=int, default=1, metavar="N", help="of arrivals and requests (default: 1)")
    add("--worker-arg", action="append", default=[], metavar="ARG", help="further argument of the worker")
    add("--out", type=Path, metavar="FILE", help="write the settings as a TOML file for `--config-file`")
    add("--json", action="store_true", help="print every trial as JSON")


def run(arguments: argparse.Namespace) -> int:
    """SettingsSearch, print the frontier and the settings; return the exit code.

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
    space = Space(_numbers(arguments, "max_num_seqs"), _numbers(arguments, "max_num_batched_tokens"))
    utilizations = _shares(arguments.gpu_memory_utilization)
    middle = space.at(space.middle())
    if middle is None:
        raise BenchError("no choice of --max-num-batched-tokens has a token for each of --max-num-seqs")
    if arguments.out is not None:
        claim_file(arguments.out)
    interrupted = False
    give_up_at = None if arguments.budget is None else time.monotonic() + arguments.budget
    with _trials(arguments, target, requests) as trials:
        search = SettingsSearch(
            space,
            trials,
            _first_rate(trials, middle, requests),
            _telling(),
            lambda: give_up_at is None or time.monotonic() < give_up_at,
        )
        try:
            search.run()
            search.lowest_memory(utilizations)
        except KeyboardInterrupt:
            output.note("stopping: this is the best so far")
            interrupted = True
    return search.found, target, interrupted


def _trials(arguments: argparse.Namespace, target: LatencyTarget, requests: int) -> Any:
    """Return what tries settings, as a context: a stack of its own, or virtual time."""
    from octavo_lab.tune.asked import Asking  # noqa: PLC0415 # needs the extra `bench`

    asking = Asking(
        source=arguments.dataset,
        context=arguments.context,
        scale=arguments.scale,
        traces=arguments.traces,
        seed=arguments.seed,
    )
    if arguments.simulate is None:
        from octavo_lab.tune.served import ServedConfig, ServedTrials  # noqa: PLC0415 # needs the extra `bench`

        config = ServedConfig(
            model=arguments.model,
            max_num_seqs=max(_numbers(arguments, "max_num_seqs")),
            max_num_batched_tokens=max(_numbers(arguments, "max_num_batched_tokens")),
            worker_args=tuple(arguments.worker_arg),
            seed=arguments.seed,
        )
        return ServedTrials(config, asking, target, requests)
    from octavo_lab.tune.simulated import SimulatedTrials, SimulatedWorker  # noqa: PLC0415 # needs `bench`

    try:
        times = StepTimes.builtin() if arguments.profile is None else StepTimes.load(arguments.profile)
    except StepTimesError as error:
        raise BenchError(str(error)) from None
    worker = SimulatedWorker(times, arguments.simulate)
    lengths = asking.lengths(requests, worker.max_model_len)
    return nullcontext(SimulatedTrials(worker, lengths, target, arguments.seed))


def _first_rate(trials: Any, middle: Settings, requests: int) -> float:
    """Return a guess: what the middle of the space serves when all come at once; where it is cheap, any."""
    measure: Callable[[Settings, int], float] | None = getattr(trials, "measure_rate", None)
    return 1.0 if measure is None else 0.5 * measure(middle, min(64, requests))


def _telling() -> Callable[[Trial], None]:
    def tell(trial: Trial) -> None:
        verdict = "kept" if trial.kept else "missed"
        early = f" after {trial.requests} requests" if trial.stopped_early else ""
        output.note(f"{trial.settings}: {trial.rate_per_s:.2f} requests/s {verdict}{early}")

    return tell


def _print(found: TuningResult, target: LatencyTarget, model: str) -> None:
    best = found.best
    if best is None:
        output.fail(f"no settings keep {target}, at however low a rate: see the trials above")
        return
    rows = [
        (
            trial.settings.max_num_seqs,
            trial.settings.max_num_batched_tokens,
            "" if trial.settings.gpu_memory_utilization is None else trial.settings.gpu_memory_utilization,
            f"{trial.rate_per_s:.2f}",
            "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:.0f}",
            "" if trial.ttft_s is None else output.duration(trial.ttft_s),
            "" if trial.tpot_s is None else output.duration(trial.tpot_s),
        )
        for trial in found.frontier()
    ]
    header = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "memory",
        "requests/s",
        "tokens/s",
        f"P{target.percentile:g} TTFT",
        f"P{target.percentile:g} TPOT",
    )
    print(output.paint(f"Frontier ({len(found.trials)} trials; {target})", "cyan"))
    print(output.table(header, rows, right=range(len(header))))
    print()
    print(f"Best: {best.settings} at {best.rate_per_s:.2f} requests/s.")
    if best.memory_short:
        print("Requests were preempted: more KV memory would help.")
    flags = as_flags(best.settings)
    print(output.paint(f"  octavo worker --model {model} {flags}", "bold"))
    print(output.paint(f"  vllm serve {model} {flags}", "bold"))


def as_flags(settings: Settings) -> str:
    """Return settings as flags, which `octavo worker` and `vllm serve` call the same."""
    flags = (
        f"--max-num-seqs {settings.max_num_seqs} --max-num-batched-tokens {settings.max_num_batched_tokens}"
    )
    if settings.gpu_memory_utilization is not None:
        flags += f" --gpu-memory-utilization {settings.gpu_memory_utilization:g}"
    return flags


def as_toml(best: Trial, target: LatencyTarget) -> str:
    """Return settings as a file for `octavo worker --config-file`."""
    settings = best.settings
    lines = [
        f"# octavo tune: {best.rate_per_s:.2f} requests/s within {target}",
        "[worker]",
        f"max_num_seqs = {settings.max_num_seqs}",
        f"max_num_batched_tokens = {settings.max_num_batched_tokens}",
    ]
    if settings.gpu_memory_utilization is not None:
        lines.append(f"gpu_memory_utilization = {settings.gpu_memory_utilization:g}")
    return "\n".join(lines) + "\n"


def _numbers(arguments: argparse.Namespace, name: str) -> list[int]:
    text: str = getattr(arguments, name)
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise BenchError(f"--{name.replace('_', '-')} must be numbers from 1 on with commas, got {text!r}")
    return numbers


def _shares(text: str) -> Sequence[float]:
    try:
        shares = [float(part) for part in text.split(",") if part]
    except ValueError:
        shares = [0.0]
    if any(not 0 < share <= 1 for share in shares):
        raise BenchError(f"--gpu-memory-utilization must be shares with commas, got {text!r}")
    return shares
