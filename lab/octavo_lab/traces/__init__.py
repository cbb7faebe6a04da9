"""Public traces: when requests came, how long they were, and which began alike. No text.

They come with the package, packed by `scripts/make_traces.py`; README.md beside this file has their sources
and licences. Copies in the formats of their publishers are read as well.
"""

from __future__ import annotations

import csv
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TextIO

from octavo_lab.command import BenchError

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
_TICKS_PER_S: Final = 10**7


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
    with path.open(newline="") as file:
        rows = sorted(_mooncake(file) if name == MOONCAKE else _azure(file), key=itemgetter(0))
    return [
        TraceRequest((ticks - rows[0][0]) / _TICKS_PER_S, max(1, prompt), max(1, output), tuple(prefix))
        for ticks, prompt, output, prefix in rows
    ]


def _azure(file: TextIO) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """Read a trace of AzurePublicDataset (AzureLLMInferenceTrace_*.csv); its times have seven decimals."""
    for row in csv.DictReader(file):
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
        ticks = seconds * _TICKS_PER_S + int(fraction.ljust(7, "0"))
        yield ticks, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _mooncake(file: TextIO) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """Read a Mooncake trace (JSON lines with hash_ids); its times are milliseconds."""
    for row in map(json.loads, file):
        ticks = row["timestamp"] * _TICKS_PER_S // 1000
        yield ticks, row["input_length"], row["output_length"], row["hash_ids"]


def packed(requests: Iterable[TraceRequest]) -> bytes:
    """Return requests as columns of JSON, compressed; nothing is lost.

    Times are the ticks (100 ns) between requests, prefixes are runs of hashes that follow each other:
    [first, count, ...].
    """
    requests = list(requests)
    ticks = [round(request.at * _TICKS_PER_S) for request in requests]
    prefixes: list[list[int]] = []
    for request in requests:
        runs = (list(run) for _, run in groupby(enumerate(request.prefix), lambda at: at[1] - at[0]))
        prefixes.append([number for run in runs for number in (run[0][1], len(run))])
    columns = {
        "gaps": [later - earlier for earlier, later in zip([0, *ticks], ticks, strict=False)],
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "output_tokens": [request.output_tokens for request in requests],
        **({"prefixes": prefixes} if any(prefixes) else {}),
    }
    text = json.dumps(columns, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def unpacked(content: bytes) -> list[TraceRequest]:
    """Return what was packed."""
    columns: dict[str, Any] = json.loads(lzma.decompress(content))
    return [
        TraceRequest(ticks / _TICKS_PER_S, prompt, output, _hashes(runs))
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
