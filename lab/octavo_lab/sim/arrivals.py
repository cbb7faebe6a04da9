"""When requests come and what they ask for: random processes and public traces."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from octavo.protocol.steps import KEY_BYTES
from octavo.sampling import SamplingParams

from octavo_lab.sim.worker import MODEL
from scheduler_svc.core.events import NewRequest

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash of the Mooncake traces stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: when it comes (seconds from the start), what it brings and gets."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Hashes of its leading blocks of MOONCAKE_BLOCK_TOKENS tokens, each of the whole prefix up to there."""


def poisson(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process, without end."""
    return gamma(rate_per_s, 1.0, rng)


def gamma(rate_per_s: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Yield times whose gaps are gamma distributed, without end.

    `cv` is the coefficient of variation of the gaps: 1 is Poisson, more is burstier.
    """
    shape = 1.0 / cv**2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1.0 / (shape * rate_per_s))
        yield at


def read_azure(path: Path) -> list[Arrival]:
    """Read a trace of AzurePublicDataset (AzureLLMInferenceTrace_*.csv)."""
    with path.open(newline="") as file:
        rows = [
            (_azure_time(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]
    start = min(at for at, _, _ in rows)
    return sorted(
        (Arrival(at - start, max(1, prompt), max(1, output)) for at, prompt, output in rows),
        key=lambda arrival: arrival.at,
    )


def _azure_time(text: str) -> float:
    """Seconds of a timestamp with seven decimals, one more than datetime reads."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or '0'}")


def read_mooncake(path: Path) -> list[Arrival]:
    """Read a Mooncake trace (JSON lines with hash_ids)."""
    arrivals = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            arrivals.append(
                Arrival(
                    row["timestamp"] / 1000.0,
                    max(1, row["input_length"]),
                    max(1, row["output_length"]),
                    tuple(row["hash_ids"]),
                )
            )
    return sorted(arrivals, key=lambda arrival: arrival.at)


def compressed(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """Return the same requests, coming `factor` times as fast."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]


def prefix_keys(arrival: Arrival, block_size: int) -> tuple[bytes, ...]:
    """Return content keys of the full blocks of a prompt, which are equal where its prefix hashes are.

    `block_size` divides MOONCAKE_BLOCK_TOKENS.
    """
    per_hash = MOONCAKE_BLOCK_TOKENS // block_size
    full = arrival.prompt_tokens // block_size
    return tuple(
        (arrival.prefix[index // per_hash] * per_hash + index % per_hash).to_bytes(KEY_BYTES, "big")
        for index in range(min(full, len(arrival.prefix) * per_hash))
    )


def request_of(arrival: Arrival, request_id: str, seed: int, block_size: int = 16) -> NewRequest:
    """Return the request of a trace row; it generates exactly the tokens that the trace says.

    Class, tenant and deadlines are those of nobody in particular: `dataclasses.replace` sets others.
    """
    keys = prefix_keys(arrival, block_size)
    return NewRequest(
        request_id=request_id,
        model=MODEL,
        prompt_token_ids=range(arrival.prompt_tokens),
        sampling=SamplingParams(n=1, seed=seed, max_tokens=arrival.output_tokens, ignore_eos=True),
        prompt_keys=keys,
        root_key=seed.to_bytes(KEY_BYTES, "big") if keys else b"",
    )
