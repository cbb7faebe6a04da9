"""From the name of a dataset to requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from octavo_lab.command import BenchError
from octavo_lab.datasets import files, lengths
from octavo_lab.datasets.corpus import Corpus, open_corpus
from octavo_lab.datasets.lengths import Drawn, Lengths
from octavo_lab.datasets.tokenizers import Tokenizer
from octavo_lab.load.target import PlannedRequest
from octavo_lab.traces import MOONCAKE_BLOCK_TOKENS, TRACES, TraceRequest

FIXED: Final = "fixed"
LOGNORMAL: Final = "lognormal"
NAMES: Final = (*TRACES, LOGNORMAL, FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Which requests to make, for which model."""

    source: str
    """One of NAMES, or the path of a file."""
    context: int
    """Tokens that prompt and output may have together."""
    prompt_tokens: float = 256
    """Mean, for `lognormal` and `fixed`."""
    output_tokens: float | None = None
    """The same; for a file what is wanted where it does not say. None: 64, or what the file says."""
    cv: float = 1.0
    """Coefficient of variation, for `lognormal`."""
    scale: int | None = None
    """What the lengths of a trace are divided by; None is worked out from the context."""
    traces: Path | None = None
    """Folder of the traces; see `octavo_lab.traces.read_trace`."""
    buckets: tuple[int, ...] = ()
    """Upper prompt lengths; requests are labelled with the one they fall into."""
    seed: int = 1


class Dataset:
    """Requests to draw from. What is drawn depends on the seed of the configuration only."""

    def __init__(
        self, config: DatasetConfig, source: Lengths | Drawn | files.FileRequests, corpus: Corpus | None
    ) -> None:
        self._config = config
        self._source = source
        self._corpus = corpus
        self._blocks: dict[int, str] = {}

    @property
    def description(self) -> str:
        """For the record."""
        if isinstance(self._source, files.FileRequests):
            return f"{Path(self._config.source).name}, {len(self._source.requests)} requests"
        told = self._source.description if isinstance(self._source, Lengths) else str(self._source)
        return f"{told}; prompts from Octavo's corpus, seed {self._config.seed}"

    @property
    def at_s(self) -> tuple[float, ...] | None:
        """When the requests came, in seconds from the first, where the source says so."""
        if isinstance(self._source, files.FileRequests):
            return self._source.at_s
        if isinstance(self._source, Lengths):
            return tuple(arrival.at for arrival in self._source.arrivals)
        return None

    def requests(self, count: int) -> list[PlannedRequest]:
        """Return so many requests.

        Those of a trace are in a row, from a place that the seed draws; those of a file begin with its first.

        Raises:
            BenchError: a file has fewer.
        """
        seed, context = self._config.seed, self._config.context
        if isinstance(self._source, files.FileRequests):
            return self._from_file(self._source.requests, count)
        if isinstance(self._source, Lengths):
            return self._labelled(self._written(lengths.window(self._source.arrivals, count, seed)))
        return self._labelled(self._written(self._source.draw(count, context, seed)))

    def in_order(self, count: int | None = None) -> list[PlannedRequest]:
        """Return the first requests, or all, as they go with `at_s`."""
        if isinstance(self._source, Drawn):
            raise BenchError("drawn lengths have no times to replay")
        if isinstance(self._source, files.FileRequests):
            requests = self._source.requests
            return self._from_file(requests, len(requests) if count is None else count)
        return self._labelled(self._written(self._source.arrivals[:count]))

    def _from_file(self, requests: Sequence[PlannedRequest], count: int) -> list[PlannedRequest]:
        if count > len(requests):
            raise BenchError(
                f"{self._config.source} has {len(requests)} requests, and {count} are needed: ask for fewer, "
                "for a shorter time, or for a lower rate (repeated prompts would come from the cache)"
            )
        return self._labelled(requests[:count])

    def _written(self, arrivals: Iterable[TraceRequest]) -> Iterable[PlannedRequest]:
        """Give each request a prompt; those whose leading hashes are equal get equal beginnings."""
        assert self._corpus is not None, "only files come without a corpus"
        for arrival in arrivals:
            shared, covered = self._shared_prefix(self._corpus, arrival)
            yield PlannedRequest(
                prompt=shared + self._corpus.window(arrival.prompt_tokens - covered),
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
            )

    def _shared_prefix(self, corpus: Corpus, arrival: TraceRequest) -> tuple[str, int]:
        scale = self._source.scale if isinstance(self._source, Lengths) else 1
        per_block = MOONCAKE_BLOCK_TOKENS // scale
        if not per_block:
            return "", 0
        # One token at least is the request's own: the last hash of a trace stands for a part of a block.
        whole = min(len(arrival.prefix), (arrival.prompt_tokens - 1) // per_block)
        for block in arrival.prefix[:whole]:
            if block not in self._blocks:
                self._blocks[block] = corpus.window(per_block)
        return "".join(self._blocks[block] for block in arrival.prefix[:whole]), whole * per_block

    def _labelled(self, requests: Iterable[PlannedRequest]) -> list[PlannedRequest]:
        if not self._config.buckets:
            return list(requests)
        return [replace(one, kind=bucket_of(one.prompt_tokens, self._config.buckets)) for one in requests]


async def load(config: DatasetConfig, tokenizer: Tokenizer) -> Dataset:
    """Open a dataset.

    Raises:
        BenchError: there is none of that name, or it does not fit.
    """
    if config.source not in NAMES:
        path = _file(config.source)
        wanted = None if config.output_tokens is None else round(config.output_tokens)
        return Dataset(config, await files.read(path, tokenizer, wanted), None)
    corpus = await open_corpus(tokenizer, config.seed)
    if config.source in TRACES:
        source: Lengths | Drawn = lengths.of_trace(
            config.source, config.context, scale=config.scale, folder=config.traces
        )
    else:
        cv = config.cv if config.source == LOGNORMAL else 0.0
        source = Drawn(config.prompt_tokens, config.output_tokens or 64, cv)
    return Dataset(config, source, corpus)


def _file(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        raise BenchError(f"no dataset {source!r}: there are {', '.join(NAMES)}, and files")
    return path


def bucket_of(prompt_tokens: int, bounds: Sequence[int]) -> str:
    """Return the label of the bucket of a prompt: `<=128`, or `>512` beyond the last bound."""
    for bound in sorted(bounds):
        if prompt_tokens <= bound:
            return f"<={bound}"
    return f">{max(bounds)}"
