"""The laboratory itself: what chunking spares, and whether our generator agrees with a public one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from octavo_lab.chunked import as_json
from octavo_lab.chunked.experiment import ChunkedConfig, measure
from octavo_lab.datasets.load import DatasetConfig, load
from octavo_lab.datasets.tokenizers import FileTokenizer
from octavo_lab.load.arrivals import Closed, Process, Replay
from octavo_lab.load.generator import Traffic, generate
from octavo_lab.load.summary import summarize
from octavo_lab.load.target import Request
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
from octavo_lab.scorecard import Measured, at_most, entry
from octavo_lab.scorecard.demo_model import quiet
from octavo_lab.scorecard.system import ROUNDS
from octavo_lab.scorecard.vllm_server import BENCH_SERVE, MODEL, VllmServer, vllm_serve


@entry("lab.chunked_itl_ratio", "ratio", at_most(0.65), long=True)
async def chunked_itl_ratio() -> Measured:
    """P99 time between tokens of running requests while prompts of 2048 tokens arrive: chunked over whole

    Real stacks with the demo model, in turns; see `octavo bench chunked`.
    """
    found = await measure(ChunkedConfig(), quiet)
    if found.ratio is None:
        raise RuntimeError("too few requests were answered for a P99")
    return Measured(found.ratio.value, as_json(found))


NUM_REQUESTS: Final = 50
NUM_WARM_UP: Final = 10
ALONE: Final = "one at a time"
OPEN_LOOP: Final = "open loop"
RATE_PER_S: Final = 1.0
"""Of the open loop; half of what two slow cores can do: beyond that a queue makes much of a little noise."""
TELLING: Final = 0.05
"""A figure tells something when the turns of `vllm bench serve` itself agree on it this well."""
_STATISTICS: Final = {"mean": "mean", "median": "p50", "p90": "p90"}
_TIMES: Final = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
"""Names of `vllm bench serve`, and ours for the same things."""
_BENCH_TIMEOUT_S: Final = 300.0
Figures = dict[str, float]


@entry("lab.generator_agreement", "relative difference", at_most(0.05), long=True)
async def generator_agreement() -> Measured:
    """same traffic at `vllm serve` by our generator and by `vllm bench serve`: the figure that differs most

    They take turns, of which the medians count; in the open loop each of ours replays the times of theirs.
    Figures on which the other tool's own turns differ from each other say nothing about ours; they are in
    the details. The server does not cache prefixes, or whoever comes second would have an easier time.
    """
    if importlib.util.find_spec("pandas") is None:
        raise RuntimeError("`vllm bench serve` reads its requests with pandas, which is not installed")
    config = DatasetConfig(source="fixed", context=1024, prompt_tokens=96, output_tokens=32)
    requests = (await load(config, FileTokenizer.named("demo"))).requests(NUM_REQUESTS)
    ours: dict[str, list[Figures]] = {ALONE: [], OPEN_LOOP: []}
    theirs: dict[str, list[Figures]] = {ALONE: [], OPEN_LOOP: []}
    flags = (
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "32",
    )
    with tempfile.TemporaryDirectory(prefix="octavo-agreement-") as scratch:
        async with vllm_serve(*flags) as server:
            _, at_s = await _their_turn(server, requests[:NUM_WARM_UP], Path(scratch), OPEN_LOOP)
            await _our_turn(server, requests[:NUM_WARM_UP], Replay(at_s))
            for _ in range(ROUNDS):
                for traffic in (ALONE, OPEN_LOOP):
                    figures, at_s = await _their_turn(server, requests, Path(scratch), traffic)
                    theirs[traffic].append(figures)
                    arrivals = Closed(1) if traffic == ALONE else Replay(at_s)
                    ours[traffic].append(await _our_turn(server, requests, arrivals))
    return compared(ours, theirs)


def compared(ours: dict[str, list[Figures]], theirs: dict[str, list[Figures]]) -> Measured:
    """Return by how much the figure differs that differs most, of those that tell something.

    Raises:
        RuntimeError: no figure tells anything.
    """
    telling: Figures = {}
    noisy: dict[str, tuple[float, float]] = {}
    for traffic, turns in theirs.items():
        for name in ours[traffic][0]:
            values = [turn[name] for turn in turns]
            if (middle := statistics.median(values)) <= 0:
                continue
            difference = statistics.median(turn[name] for turn in ours[traffic]) / middle - 1
            spread = (max(values) - min(values)) / middle
            if spread <= TELLING:
                telling[f"{name}, {traffic}"] = round(difference, 4)
            else:
                noisy[f"{name}, {traffic}"] = round(difference, 4), round(spread, 4)
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
    return Measured(abs(telling[worst]), details)


async def _their_turn(
    server: VllmServer, requests: Sequence[Request], scratch: Path, traffic: str
) -> tuple[Figures, tuple[float, ...]]:
    """Return the figures of `vllm bench serve`, and when it sent."""
    rate = ("inf", "--max-concurrency", "1") if traffic == ALONE else (str(RATE_PER_S),)
    prompts, result = scratch / "prompts.jsonl", "result.json"
    lines = [json.dumps({"prompt": one.prompt, "output_tokens": one.output_tokens}) for one in requests]
    await asyncio.to_thread(prompts.write_text, "\n".join(lines))
    command = [
        *(*BENCH_SERVE, "--backend", "openai", "--base-url", server.base_url),
        *("--model", MODEL, "--tokenizer", str(server.model_folder)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--disable-shuffle", "--num-prompts", str(len(requests))),
        *("--request-rate", *rate, "--seed", "1", "--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(scratch), "--result-filename", result),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, env=server.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    # Past its time it dies with this measure.
    said, _ = await asyncio.wait_for(process.communicate(), _BENCH_TIMEOUT_S)
    if process.returncode != 0:
        raise RuntimeError(f"vllm bench serve failed: {said.decode(errors='replace')[-500:]}")
    found = json.loads(await asyncio.to_thread((scratch / result).read_text))
    if found["completed"] != len(requests):
        raise RuntimeError(f"{found['completed']} of {len(requests)} requests were answered")
    names = ["output_throughput", *(f"{kind}_{time}_ms" for time in _TIMES for kind in _STATISTICS)]
    first = min(found["start_times"])
    return {name: found[name] for name in names}, tuple(at - first for at in found["start_times"])


async def _our_turn(server: VllmServer, requests: Sequence[Request], arrivals: Process) -> Figures:
    """Return the same of ours; none where requests are too few for it."""
    async with OpenAiTarget(OpenAiConfig(base_url=server.base_url, model=MODEL)) as target:
        run = await generate(target, Traffic(requests=requests, arrivals=arrivals))
    summary = summarize(run)
    if summary.outcomes["ok"] != len(requests):
        raise RuntimeError(f"not all requests were answered: {summary.outcomes}")
    times = {
        f"{kind}_{time}_ms": getattr(getattr(summary, ours), our_kind)
        for time, ours in _TIMES.items()
        for kind, our_kind in _STATISTICS.items()
    }
    found = {name: 1000.0 * value for name, value in times.items() if value is not None}
    return {"output_throughput": summary.makespan_output_tokens_per_s, **found}
