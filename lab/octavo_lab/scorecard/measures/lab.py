"""The laboratory itself: its ladder, what chunking spares, whether our generator agrees with a public one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import shlex
import statistics
import tempfile
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from octavo_lab.chunked import ChunkedConfig, as_json, measure
from octavo_lab.datasets.load import DatasetConfig, load
from octavo_lab.datasets.tokenizers import FileTokenizer
from octavo_lab.ladder.config import QUICK
from octavo_lab.ladder.experiment import Experiment
from octavo_lab.ladder.pages import write
from octavo_lab.ladder.report import make_report
from octavo_lab.ladder.workload import Workload
from octavo_lab.load.arrivals import Closed, Process, Replay
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.summary import summarize
from octavo_lab.load.target import PlannedRequest
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
from octavo_lab.scorecard import Measurement, at_least, at_most, entry, system
from octavo_lab.scorecard.demo_model import quiet
from octavo_lab.scorecard.vllm_server import BENCH_SERVE, MODEL, VllmServer, vllm_serve


@entry("lab.chunked_itl_ratio", "ratio", at_most(0.65), long=True)
async def chunked_itl_ratio() -> Measurement:
    """P99 time between tokens of running requests while prompts of 2048 tokens arrive: chunked over whole

    Real stacks with the demo model, in turns; see `octavo bench chunked`.
    """
    found = await measure(ChunkedConfig(), quiet)
    if found.ratio is None:
        raise RuntimeError("too few requests were answered for a P99")
    return Measurement(found.ratio.value, as_json(found))


NUM_REQUESTS: Final = 50
NUM_WARM_UP: Final = 10
ALONE: Final = "one at a time"
OPEN_LOOP: Final = "open loop"
RATE_PER_S: Final = 1.0
"""Of the open loop; half of what two slow cores can do: beyond that a queue makes much of a little noise."""
TELLING: Final = 0.05
"""A figure tells something when the turns of `vllm bench serve` itself agree on it this well."""
_TIMES: Final = {
    f"{kind}_{time}_ms": (ours, our_kind)
    for time, ours in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "itl_s"), ("e2el", "e2e_s"))
    for kind, our_kind in (("mean", "mean"), ("median", "p50"), ("p90", "p90"))
}
"""Names of `vllm bench serve`, and ours for the same things."""
_BENCH_TIMEOUT_S: Final = 300.0
Figures = dict[str, float]


@entry("lab.generator_agreement", "relative difference", at_most(0.05), long=True)
async def generator_agreement() -> Measurement:
    """same traffic at `vllm serve` by our generator and by `vllm bench serve`: the figure that differs most

    They take turns, of which the medians count; in the open loop each of ours replays the times of theirs.
    Figures on which the other tool's own turns differ from each other say nothing about ours; they are in
    the details. The server does not cache prefixes, or whoever comes second would have an easier time.
    """
    if importlib.util.find_spec("pandas") is None:
        raise RuntimeError("`vllm bench serve` reads its requests with pandas, which is not installed")
    config = DatasetConfig(source="fixed", context=1024, prompt_tokens=96, output_tokens=32)
    requests = (await load(config, FileTokenizer("demo"))).requests(NUM_REQUESTS)
    ours: dict[str, list[Figures]] = {ALONE: [], OPEN_LOOP: []}
    theirs: dict[str, list[Figures]] = {ALONE: [], OPEN_LOOP: []}
    flags = "--enforce-eager --no-enable-prefix-caching --max-model-len 1024 --max-num-seqs 32"
    async with vllm_serve(*shlex.split(flags)) as server:
        _, at_s = await _their_turn(server, requests[:NUM_WARM_UP], OPEN_LOOP)
        await _our_turn(server, requests[:NUM_WARM_UP], Replay(at_s))
        for traffic in (ALONE, OPEN_LOOP) * system.ROUNDS:
            figures, at_s = await _their_turn(server, requests, traffic)
            theirs[traffic].append(figures)
            arrivals = Closed(1) if traffic == ALONE else Replay(at_s)
            ours[traffic].append(await _our_turn(server, requests, arrivals))
    return _agreement(ours, theirs)


def _agreement(ours: dict[str, list[Figures]], theirs: dict[str, list[Figures]]) -> Measurement:
    """Return by how much the figure differs that differs most, of those that tell something."""
    telling: Figures = {}
    noisy: dict[str, tuple[float, float]] = {}
    for traffic, turns in theirs.items():
        for name in ours[traffic][0]:
            values = [turn[name] for turn in turns]
            if (middle := statistics.median(values)) <= 0:
                continue
            difference = round(statistics.median(turn[name] for turn in ours[traffic]) / middle - 1, 4)
            if (spread := (max(values) - min(values)) / middle) <= TELLING:
                telling[f"{name}, {traffic}"] = difference
            else:
                noisy[f"{name}, {traffic}"] = difference, round(spread, 4)
    if not telling:
        raise RuntimeError(f"`vllm bench serve` agrees with itself on nothing: {noisy}")
    worst = max(telling, key=lambda name: abs(telling[name]))
    details: dict[str, Any] = {
        "worst": worst,
        "differences": telling,
        "too noisy to tell, with the spread of `vllm bench serve` itself": noisy,
        "ours": ours,
        "vllm bench serve": theirs,
    }
    return Measurement(abs(telling[worst]), details)


async def _their_turn(
    server: VllmServer, requests: Sequence[PlannedRequest], traffic: str
) -> tuple[Figures, tuple[float, ...]]:
    """Return the figures of `vllm bench serve`, and when it sent."""
    rate = "inf --max-concurrency 1" if traffic == ALONE else str(RATE_PER_S)
    lines = [json.dumps({"prompt": one.prompt, "output_tokens": one.output_tokens}) for one in requests]
    with tempfile.TemporaryDirectory(prefix="octavo-agreement-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(lines))
        flags = f"""
            --backend openai --base-url {server.base_url} --model {MODEL} --request-rate {rate} --seed 1
            --tokenizer {shlex.quote(str(server.model_folder))} --dataset-name custom --dataset-path {prompts}
            --custom-output-len -1 --skip-chat-template --disable-shuffle --num-prompts {len(requests)}
            --ignore-eos --temperature 0 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 90
            --disable-tqdm --save-result --save-detailed --result-dir {folder} --result-filename result.json
        """
        process = await asyncio.create_subprocess_exec(
            *BENCH_SERVE, *shlex.split(flags), env=server.environment, stdout=PIPE, stderr=STDOUT
        )
        # Past its time it dies with this measure.
        said, _ = await asyncio.wait_for(process.communicate(), _BENCH_TIMEOUT_S)
        if process.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed: {said.decode(errors='replace')[-500:]}")
        found = json.loads((Path(folder) / "result.json").read_text())
    if found["completed"] != len(requests):
        raise RuntimeError(f"{found['completed']} of {len(requests)} requests were answered")
    first = min(found["start_times"])
    figures = {name: found[name] for name in ("output_throughput", *_TIMES)}
    return figures, tuple(at - first for at in found["start_times"])


async def _our_turn(server: VllmServer, requests: Sequence[PlannedRequest], arrivals: Process) -> Figures:
    """Return the same of ours; none where requests are too few for it."""
    async with OpenAiTarget(OpenAiConfig(base_url=server.base_url, model=MODEL)) as target:
        summary = summarize(await generate(target, Traffic(requests=requests, arrivals=arrivals)))
    if summary.outcomes["ok"] != len(requests):
        raise RuntimeError(f"not all requests were answered: {summary.outcomes}")
    times = {name: getattr(getattr(summary, ours), kind) for name, (ours, kind) in _TIMES.items()}
    found = {name: 1000.0 * value for name, value in times.items() if value is not None}
    return {"output_throughput": summary.makespan_output_tokens_per_s, **found}


# -- static against continuous, contiguous against paged: the ladder's figures

_ARMS: Final = "continuous + paged + chunked prefill"


def _figure(name: str) -> Measurement:
    """Return a figure of the report's comparison: a share, or an estimate with its bounds."""
    report = _report()
    compared, hardware = report["comparison"], report["environments"][-1]["hardware"]
    details = {"preset": report["config"]["preset"], "partial": report["partial"]}
    details |= {"begun": report["started_at"], "on": f"{hardware['cpu']}, {hardware['cores']} cores"}
    found = compared[name]
    if found is None:
        return Measurement(math.nan, {"why": "too few requests, or the arms were not measured", **details})
    if not isinstance(found, dict):
        return Measurement(found, details)
    if name == "throughput_ratio" and compared["throughput_of_best_static"]:
        details["to the best static arm"] = compared["throughput_of_best_static"]["value"]
    return Measurement(found["value"], {"low": found["low"], "high": found["high"], **details})


def _report() -> dict[str, Any]:
    """Return the report in the folder that OCTAVO_LADDER names (`octavo bench ladder --preset full`).

    Without it the two arms that are compared are measured now, which takes half an hour. Each entry has a
    process of its own; those of one scorecard share what the first of them has measured.
    """
    named = os.environ.get("OCTAVO_LADDER")
    folder = Path(named or f"{tempfile.gettempdir()}/octavo-ladder-{os.getppid()}")
    if not named and not (folder / "report.json").exists():
        config = replace(QUICK, budget_s=30 * 60.0)
        experiment = Experiment(config, folder, Workload(config), lambda what, fraction, left_s: None)
        experiment.run()
        write(make_report(experiment.measured()), folder)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


_RATE: Final = f"tokens per second of a saturated service, {_ARMS} to the tuned control (static + contiguous)"
_P50: Final = f"end-to-end P50 at the control's capacity, {_ARMS} to the control"
_KV: Final = """written slots over all slots of the paged pool, over the time in which requests waited,
saturated"""
for name, unit, target, measures in (
    # At the highest rung, 1.5 times the capacity of the best arm.
    ("throughput_ratio", "times", at_least(1.5), _RATE),
    # Over all requests, those without an answer as slower than all others.
    ("p50_ratio", "ratio", at_most(0.6), _P50),
    # From at least 500 requests of each.
    ("p99_ratio", "ratio", at_most(0.5), "the same for the P99"),
    # At the highest rung.
    ("kv_use_paged", "share", at_least(0.93), _KV),
    # The control knows each answer's length, so it reserves no more than it needs.
    ("kv_use_static", "share", None, "the same of the control's contiguous memory"),
):
    entry(f"lab.{name}", unit, target, long=True, measures=measures)(partial(_figure, name))
