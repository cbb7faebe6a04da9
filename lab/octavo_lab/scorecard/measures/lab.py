"""The laboratory itself: what chunking spares, and whether our generator agrees with a public one."""

# ruff: noqa: PLC0415 - what only one measure needs is loaded for that one

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo_lab.scorecard import Measured, at_most, entry
from octavo_lab.scorecard.vllm_server import BENCH_SERVE, MODEL, VllmServer, vllm_serve

if TYPE_CHECKING:
    from octavo_lab.load.arrivals import Process
    from octavo_lab.load.summary import Summary
    from octavo_lab.load.target import Request

# -- chunked prefill


@entry(
    "lab.chunked_itl_ratio",
    "P99 time between tokens of running requests while prompts of 2048 tokens arrive: chunked over whole",
    "ratio",
    at_most(0.65),
    long=True,
)
async def chunked_itl_ratio() -> Measured:
    """Real stacks with the demo model, in turns; see `octavo bench chunked`."""
    from octavo_lab.chunked import as_json
    from octavo_lab.chunked.experiment import ChunkedConfig, measure

    found = await measure(ChunkedConfig(), lambda what, fraction: None)
    ratio = found.ratio
    if ratio is None:
        raise RuntimeError("too few requests were answered for a P99")
    return Measured(ratio.value, as_json(found))


# -- agreement with `vllm bench serve`

NUM_REQUESTS: Final = 50
NUM_WARM_UP: Final = 10
ALONE: Final = "one at a time"
OPEN_LOOP: Final = "open loop"
RATE_PER_S: Final = 1.0
"""Of the open loop; half of what two slow cores can do: beyond that a queue makes much of a little noise."""
TELLING: Final = 0.05
"""A figure tells something when the turns of `vllm bench serve` itself agree on it this well."""
PROMPT_TOKENS: Final = 96
OUTPUT_TOKENS: Final = 32
ROUNDS: Final = 3
_FIGURES: Final[dict[str, str | tuple[str, str]]] = {
    "output_throughput": "makespan_output_tokens_per_s",
    "mean_ttft_ms": ("ttft_s", "mean"),
    "median_ttft_ms": ("ttft_s", "p50"),
    "p90_ttft_ms": ("ttft_s", "p90"),
    "mean_tpot_ms": ("tpot_s", "mean"),
    "median_tpot_ms": ("tpot_s", "p50"),
    "p90_tpot_ms": ("tpot_s", "p90"),
    "mean_itl_ms": ("itl_s", "mean"),
    "median_itl_ms": ("itl_s", "p50"),
    "p90_itl_ms": ("itl_s", "p90"),
    "mean_e2el_ms": ("e2e_s", "mean"),
    "median_e2el_ms": ("e2e_s", "p50"),
    "p90_e2el_ms": ("e2e_s", "p90"),
}
"""Figures of `vllm bench serve`, and ours for the same things."""
_BENCH_TIMEOUT_S: Final = 300.0


@entry(
    "lab.generator_agreement",
    "same traffic at `vllm serve` by our generator and by `vllm bench serve`: the figure that differs most",
    "relative difference",
    at_most(0.05),
    long=True,
)
async def generator_agreement() -> Measured:
    """Take turns, of which the medians count; in the open loop each of ours replays the times of theirs.

    Figures on which the other tool's own turns differ from each other say nothing about ours; they are in
    the details. The server does not cache prefixes, or whoever comes second would have an easier time.

    Raises:
        RuntimeError: no figure tells anything.
    """
    from octavo_lab.datasets.load import DatasetConfig, load
    from octavo_lab.datasets.tokenizers import FileTokenizer
    from octavo_lab.load.arrivals import Closed, Replay

    if importlib.util.find_spec("pandas") is None:
        raise RuntimeError("`vllm bench serve` reads its requests with pandas, which is not installed")
    config = DatasetConfig(
        source="fixed", context=1024, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS
    )
    requests = (await load(config, FileTokenizer.named("demo"))).requests(NUM_REQUESTS)
    ours: dict[str, list[dict[str, float]]] = {ALONE: [], OPEN_LOOP: []}
    theirs: dict[str, list[dict[str, float]]] = {ALONE: [], OPEN_LOOP: []}
    flags = ("--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "1024")
    with tempfile.TemporaryDirectory(prefix="octavo-agreement-") as scratch:
        async with vllm_serve(*flags, "--max-num-seqs", "32") as server:
            _, at_s = await _their_turn(server, requests[:NUM_WARM_UP], Path(scratch), OPEN_LOOP)
            await _our_turn(server, requests[:NUM_WARM_UP], Replay(at_s))
            for _ in range(ROUNDS):
                for traffic in (ALONE, OPEN_LOOP):
                    figures, at_s = await _their_turn(server, requests, Path(scratch), traffic)
                    theirs[traffic].append(figures)
                    arrivals = Closed(1) if traffic == ALONE else Replay(at_s)
                    ours[traffic].append(await _our_turn(server, requests, arrivals))
    compared = {
        f"{name}, {traffic}": _Compared.of(
            [turn[name] for turn in ours[traffic]], [turn[name] for turn in theirs[traffic]]
        )
        for traffic in theirs
        for name in ours[traffic][0]
        if statistics.median(turn[name] for turn in theirs[traffic]) > 0
    }
    telling = {name: one for name, one in compared.items() if one.spread <= TELLING}
    if not telling:
        raise RuntimeError(f"`vllm bench serve` agrees with itself on nothing: {compared}")
    worst = max(telling, key=lambda name: abs(telling[name].difference))
    return Measured(
        abs(telling[worst].difference),
        {
            "worst": worst,
            "differences": {name: round(one.difference, 4) for name, one in telling.items()},
            "too noisy to tell, with the spread of `vllm bench serve` itself": {
                name: (round(one.difference, 4), round(one.spread, 4))
                for name, one in compared.items()
                if name not in telling
            },
            "ours": ours,
            "vllm bench serve": theirs,
        },
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """A figure of ours against one of theirs."""

    difference: float
    """Of the medians, over theirs."""
    spread: float
    """Between their own extremes, over their median."""

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> _Compared:
        middle = statistics.median(theirs)
        return cls(statistics.median(ours) / middle - 1, (max(theirs) - min(theirs)) / middle)


async def _their_turn(
    server: VllmServer, requests: Sequence[Request], scratch: Path, traffic: str
) -> tuple[dict[str, float], tuple[float, ...]]:
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
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _BENCH_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"vllm bench serve failed: {said.decode(errors='replace')[-500:]}")
    found = json.loads(await asyncio.to_thread((scratch / result).read_text))
    if found["completed"] != len(requests):
        raise RuntimeError(f"{found['completed']} of {len(requests)} requests were answered")
    first = min(found["start_times"])
    return {name: found[name] for name in _FIGURES}, tuple(at - first for at in found["start_times"])


async def _our_turn(server: VllmServer, requests: Sequence[Request], arrivals: Process) -> dict[str, float]:
    from octavo_lab.load.generator import Traffic, generate
    from octavo_lab.load.summary import summarize
    from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget

    async with OpenAiTarget(OpenAiConfig(base_url=server.base_url, model=MODEL)) as target:
        run = await generate(target, Traffic(requests=requests, arrivals=arrivals))
    summary = summarize(run)
    if summary.outcomes["ok"] != len(requests):
        raise RuntimeError(f"not all requests were answered: {summary.outcomes}")
    figures = {name: _ours(summary, where) for name, where in _FIGURES.items()}
    return {name: value for name, value in figures.items() if value is not None}


def _ours(summary: Summary, where: str | tuple[str, str]) -> float | None:
    """Return a figure of ours: a rate as it is, a time in milliseconds; None where requests are too few."""
    if isinstance(where, str):
        return float(getattr(summary, where))
    value: float | None = getattr(getattr(summary, where[0]), where[1])
    return None if value is None else 1000.0 * value
