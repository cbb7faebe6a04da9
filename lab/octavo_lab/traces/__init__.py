"""Public traces: when requests came, how long they were, and which began alike. No text.

They come with the package, packed by `scripts/make_traces.py`; README.md beside this file has their sources
and licences. Copies in the formats of their publishers are read as well.
"""

from __future__ import annotations

import csv
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from octavo_lab.command import BenchError

AZURE: Final = ("azure-conv", "azure-code")
MOONCAKE: Final = "mooncake"
TRACES: Final = {
    "azure-conv": "azure_llm_2023_conv.csv",
    "azure-code": "azure_llm_2023_code.csv",
    MOONCAKE: "mooncake_conversation.jsonl",
}
"""Names of the traces, and of the files that a user's folder has of them."""
TRACES_VARIABLE: Final = "OCTAVO_TRACES"
MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens that one hash of the Mooncake trace stands for."""
_AZURE_TICKS_PER_S: Final = 10**7
_MOONCAKE_TICKS_PER_S: Final = 10**3


class TraceNotFoundError(BenchError):
    """A trace is not where it was looked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: when it comes (seconds from the start), what it brings and gets."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Hashes of its leading blocks of MOONCAKE_BLOCK_TOKENS tokens, each of the whole prefix up to there."""


def read_trace(name: str, folder: Path | None = None) -> list[TraceRequest]:
    """Return the requests of one of TRACES, in the order of their times.

    They are read from `folder`, else from the folder that OCTAVO_TRACES names, else from the package.

    Raises:
        TraceNotFoundError: the folder that was named does not have it.
    """
    if folder is None and (named := os.environ.get(TRACES_VARIABLE)):
        folder = Path(named)
    if folder is None:
        return unpacked((Path(__file__).parent / f"{name}.json.xz").read_bytes())
    path = folder / TRACES[name]
    if not path.is_file():
        raise TraceNotFoundError(
            f"no {path.name} in {folder}: without --traces and {TRACES_VARIABLE} the trace that comes with "
            "octavo-lab is read"
        )
    return read_mooncake(path) if name == MOONCAKE else read_azure(path)


def read_azure(path: Path) -> list[TraceRequest]:
    """Read a trace of AzurePublicDataset (AzureLLMInferenceTrace_*.csv)."""
    with path.open(newline="") as file:
        rows = [
            (_azure_ticks(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
            for row in csv.DictReader(file)
        ]
    return _requests(rows, _AZURE_TICKS_PER_S)


def _azure_ticks(text: str) -> int:
    """Return a timestamp with seven decimals, one more than datetime reads."""
    whole, _, fraction = text.partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * _AZURE_TICKS_PER_S + int(fraction.ljust(7, "0"))


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Read a Mooncake trace (JSON lines with hash_ids)."""
    with path.open() as file:
        rows = [
            (row["timestamp"], row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for row in map(json.loads, file)
        ]
    return _requests(rows, _MOONCAKE_TICKS_PER_S)


def _requests(rows: Sequence[tuple[int, int, int, tuple[int, ...]]], ticks_per_s: int) -> list[TraceRequest]:
    start = min(ticks for ticks, *_ in rows)
    requests = [
        TraceRequest((ticks - start) / ticks_per_s, max(1, prompt), max(1, output), prefix)
        for ticks, prompt, output, prefix in rows
    ]
    return sorted(requests, key=lambda request: request.at)


def packed(requests: Iterable[TraceRequest]) -> bytes:
    """Return requests as columns of JSON, compressed; nothing is lost.

    Times are the ticks (100 ns) between requests, prefixes are runs of hashes that follow each other:
    [first, count, ...].
    """
    requests = list(requests)
    ticks = [round(request.at * _AZURE_TICKS_PER_S) for request in requests]
    prefixes = [_runs(request.prefix) for request in requests]
    columns = {
        "gaps": [later - earlier for earlier, later in zip([0, *ticks], ticks, strict=False)],
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "output_tokens": [request.output_tokens for request in requests],
        **({"prefixes": prefixes} if any(prefixes) else {}),
    }
    text = json.dumps(columns, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def _runs(hashes: Iterable[int]) -> list[int]:
    runs: list[int] = []
    for one in hashes:
        if runs and one == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [one, 1]
    return runs


def unpacked(content: bytes) -> list[TraceRequest]:
    """Return what was packed."""
    columns: dict[str, Any] = json.loads(lzma.decompress(content))
    return [
        TraceRequest(ticks / _AZURE_TICKS_PER_S, prompt, output, _hashes(runs))
        for ticks, prompt, output, runs in zip(
            accumulate(columns["gaps"]),
            columns["prompt_tokens"],
            columns["output_tokens"],
            columns.get("prefixes") or [()] * len(columns["gaps"]),
            strict=True,
        )
    ]


def _hashes(runs: list[int]) -> tuple[int, ...]:
    return tuple(
        one for first, count in zip(runs[::2], runs[1::2], strict=True) for one in range(first, first + count)
    )
