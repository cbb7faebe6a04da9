"""When simulated requests come, and what they ask for."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from octavo.protocol.steps import KEY_BYTES
from octavo.sampling import SamplingParams

from octavo_lab.sim.worker import MODEL
from octavo_lab.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from scheduler_svc.core.events import NewRequest


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


def compressed(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the same requests, coming `factor` times as fast."""
    return [replace(request, at=request.at / factor) for request in requests]


def prefix_keys(request: TraceRequest, block_size: int, scale: int = 1) -> tuple[bytes, ...]:
    """Return content keys of the full blocks of a prompt, which are equal where its prefix hashes are.

    Lengths were divided by `scale`, so that a hash stands for fewer tokens; a whole number of blocks of them.
    """
    per_hash = MOONCAKE_BLOCK_TOKENS // scale // block_size
    covered = min(request.prompt_tokens // block_size, len(request.prefix) * per_hash)
    return tuple(
        (request.prefix[index // per_hash] * per_hash + index % per_hash).to_bytes(KEY_BYTES, "big")
        for index in range(covered)
    )


def request_of(
    request: TraceRequest, request_id: str, seed: int, block_size: int = 16, scale: int = 1
) -> NewRequest:
    """Return a request as the core takes it; it generates exactly the tokens that the trace says.

    Class, tenant and deadlines are those of nobody in particular: `dataclasses.replace` sets others.
    `scale` is as for `prefix_keys`; what no hash covers is the request's own.
    """
    keys = prefix_keys(request, block_size, scale)
    return NewRequest(
        request_id=request_id,
        model=MODEL,
        prompt_token_ids=range(request.prompt_tokens),
        sampling=SamplingParams(n=1, seed=seed, max_tokens=request.output_tokens, ignore_eos=True),
        prompt_keys=keys,
        root_key=seed.to_bytes(KEY_BYTES, "big") if keys else b"",
    )
