"""What the flags of `octavo bench serve` ask for: target, dataset, traffic, SLO."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from octavo_lab.command import BenchError
from octavo_lab.datasets.load import Dataset, DatasetConfig, load
from octavo_lab.datasets.tokenizers import FileTokenizer, ServiceTokenizer, Tokenizer
from octavo_lab.load.arrivals import Bursty, Closed, Even, Gamma, Poisson, Process, Replay
from octavo_lab.load.generator import Traffic, requests_needed
from octavo_lab.load.summary import ANSWERED, Slo
from octavo_lab.load.targets.octavo import OctavoTarget
from octavo_lab.load.targets.openai import OpenAiConfig, OpenAiTarget
from octavo_lab.serve import DEFAULT_REQUESTS

_DEFAULT_CONTEXT: Final = 2048
_MOST_PER_SLOT_PER_S: Final = 4
"""Requests that are prepared for each slot of a closed loop and second."""
_Number = TypeVar("_Number", int, float)


def target(arguments: argparse.Namespace) -> OctavoTarget | OpenAiTarget:
    """Return the target, not yet entered."""
    options = parse_options(arguments.option)
    if arguments.target != "octavo":
        return OpenAiTarget(
            OpenAiConfig(
                base_url=arguments.endpoint or "http://127.0.0.1:8000",
                api=arguments.target,
                model=arguments.model,
                api_key=_api_key(arguments),
                ignore_eos=not arguments.stop_at_eos,
                options=options,
            )
        )
    if arguments.connections < 1:
        raise BenchError("there is at least one connection")
    if arguments.stop_at_eos:
        options["ignore_eos"] = False
    return OctavoTarget(
        arguments.endpoint or os.environ.get("OCTAVO_ENDPOINT") or "127.0.0.1:50051",
        model=arguments.model,
        options=options,
        connections=arguments.connections,
        api_key=_api_key(arguments) or None,
    )


async def traffic_for(arguments: argparse.Namespace, entered: OctavoTarget | OpenAiTarget) -> Traffic:
    """Return what to send to a target, and when; its model says what fits, and how text is split."""
    record = entered.record
    tokenizer: Tokenizer
    if arguments.tokenizer is not None:
        tokenizer = FileTokenizer(arguments.tokenizer)
    elif isinstance(entered, OctavoTarget):
        tokenizer = ServiceTokenizer(entered.client, record.model)
    else:
        tokenizer = entered
    plain = ("prompt_tokens", "output_tokens", "cv", "scale", "traces", "seed")
    config = DatasetConfig(
        source=arguments.dataset,
        context=arguments.context or record.details.get("max_model_len") or _DEFAULT_CONTEXT,
        buckets=_numbers("--buckets", arguments.buckets, int) if arguments.buckets else (),
        **{name: getattr(arguments, name) for name in plain},
    )
    return traffic(arguments, await load(config, tokenizer))


def traffic(arguments: argparse.Namespace, dataset: Dataset) -> Traffic:
    """Return what to send of a dataset, and when."""
    if arguments.warm_up < 0 or (arguments.duration is not None and arguments.duration <= 0):
        raise BenchError("durations must be positive")
    if arguments.requests is not None and arguments.requests < 1:
        raise BenchError("there is at least one request to send")
    process = _process(arguments, dataset)
    count = _count(arguments, process)
    return Traffic(
        requests=dataset.in_order(count) if isinstance(process, Replay) else dataset.requests(count),
        arrivals=process,
        seed=arguments.seed,
        dataset=dataset.description,
        warm_up_s=arguments.warm_up,
        duration_s=arguments.duration,
    )


def _count(arguments: argparse.Namespace, process: Process) -> int:
    if arguments.duration is not None:
        end_s: float = arguments.warm_up + arguments.duration
        if isinstance(process, Closed):
            return process.concurrency * (1 + round(_MOST_PER_SLOT_PER_S * end_s))
        return requests_needed(process, arguments.seed, end_s)
    if isinstance(process, Replay):
        return min(arguments.requests or len(process.at_s), len(process.at_s))
    return int(arguments.requests or DEFAULT_REQUESTS)


def _process(arguments: argparse.Namespace, dataset: Dataset) -> Process:
    if arguments.concurrency is not None:
        return Closed(arguments.concurrency)
    rate = arguments.rate
    if arguments.arrivals == "replay":
        if dataset.at_s is None:
            raise BenchError("this dataset says nothing of times: there is nothing to replay")
        replay = Replay(dataset.at_s, "times of the dataset")
        return replay if rate is None else replay.at_rate(rate)
    if rate is None:
        raise BenchError("say how much to send: --rate, --concurrency, or --arrivals replay")
    match arguments.arrivals:
        case "gamma":
            return Gamma(rate, arguments.arrivals_cv)
        case "bursty":
            burst = _numbers("--burst", arguments.burst, float)
            if len(burst) != 3:
                raise BenchError("--burst is three numbers: how much faster, seconds of a burst, of the calm")
            return Bursty(rate, *burst)
        case "even":
            return Even(rate)
        case _:
            return Poisson(rate)


def parse_slo(text: str | None) -> Slo:
    """Return the SLO of `ttft=500,tpot=50` (milliseconds).

    Raises:
        BenchError: it is none.
    """
    bounds: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, bound = part.partition("=")
        name = name.strip().lower()
        if name not in ("ttft", "tpot", "e2e"):
            raise BenchError(f"an SLO bounds ttft, tpot or e2e, in milliseconds; got {part.strip()!r}")
        bounds[f"{name}_s"] = _numbers("--slo", bound, float)[0] / 1000
    return Slo(**bounds) if bounds else ANSWERED


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Return options of requests; values are JSON where they can be, else text.

    Raises:
        BenchError: one has no name or no value.
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise BenchError(f"an option is NAME=VALUE, got {text!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _numbers(flag: str, text: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise BenchError(f"{flag}: {text!r} is not made of numbers") from None


def _api_key(arguments: argparse.Namespace) -> str:
    if arguments.api_key_env is None:
        return ""
    if not (key := os.environ.get(arguments.api_key_env)):
        raise BenchError(f"the variable {arguments.api_key_env} is not set")
    return key
