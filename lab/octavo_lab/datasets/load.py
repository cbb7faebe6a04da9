"""From the name of a dataset to requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from octavo_lab.command import BenchError
from octavo_lab.datasets.corpus import Corpus, open_corpus
from octavo_lab.datasets.files import FileRequests, read
from octavo_lab.datasets.lengths import Drawn, Lengths, of_trace, window
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
    """Requests to draw from. What is drawn depends on the seed of the configuration only.

    Args:
        config: what was asked for.
        source: requests of a file, or lengths.
        corpus: where prompts of lengths come from.
    """

    def __init__(
        self, config: DatasetConfig, source: Lengths | Drawn | FileRequests, corpus: Corpus | None = None
    ) -> None:
        self.at_s: tuple[float, ...] | None = None
        """When the requests came, in seconds from the first, where the source says so."""
        told = source.description if isinstance(source, Lengths) else source
        self.description = f"{told}; prompts from Octavo's corpus, seed {config.seed}"
        """For the record."""
        self._config = config
        self._source = source
        self._corpus = corpus
        self._blocks: dict[int, str] = {}
        if isinstance(source, FileRequests):
            self.at_s = source.at_s
            self.description = f"{Path(config.source).name}, {len(source.requests)} requests"
        elif isinstance(source, Lengths):
            self.at_s = tuple(arrival.at for arrival in source.arrivals)

    def requests(self, count: int) -> list[PlannedRequest]:
        """Return so many requests.

        Those of a trace are in a row, from a place that the seed draws; those of a file begin with its first.

        Raises:
            BenchError: a file has fewer.
        """
        if isinstance(self._source, FileRequests):
            return self.in_order(count)
        seed = self._config.seed
        if isinstance(self._source, Lengths):
            return self._labelled(self._written(window(self._source.arrivals, count, seed)))
        return self._labelled(self._written(self._source.draw(count, self._config.context, seed)))

    def in_order(self, count: int | None = None) -> list[PlannedRequest]:
        """Return the first requests, or all, as they go with `at_s`."""
        if isinstance(self._source, Drawn):
            raise BenchError("drawn lengths have no times to replay")
        if isinstance(self._source, Lengths):
            return self._labelled(self._written(self._source.arrivals[:count]))
        requests = self._source.requests
        if count is not None and count > len(requests):
            raise BenchError(
                f"{self._config.source} has {len(requests)} requests, and {count} are needed: ask for fewer, "
                "for a shorter time, or for a lower rate (repeated prompts would come from the cache)"
            )
        return self._labelled(requests[:count])

    def _written(self, arrivals: Iterable[TraceRequest]) -> Iterable[PlannedRequest]:
        """Give each request a prompt; those whose leading hashes are equal get equal beginnings."""
        assert self._corpus is not None, "only files come without a corpus"
        per_block = MOONCAKE_BLOCK_TOKENS // (self._source.scale if isinstance(self._source, Lengths) else 1)
        for arrival in arrivals:
            # One token at least is the request's own: the last hash of a trace stands for a part of a block.
            whole = (arrival.prompt_tokens - 1) // per_block if per_block else 0
            blocks = arrival.prefix[:whole]
            for block in blocks:
                if block not in self._blocks:
                    self._blocks[block] = self._corpus.window(per_block)
            own = self._corpus.window(arrival.prompt_tokens - len(blocks) * per_block)
            yield PlannedRequest(
                prompt="".join(self._blocks[block] for block in blocks) + own,
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
            )

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
        return Dataset(config, await read(path, tokenizer, wanted))
    corpus = await open_corpus(tokenizer, config.seed)
    if config.source in TRACES:
        trace = of_trace(config.source, config.context, scale=config.scale, folder=config.traces)
        return Dataset(config, trace, corpus)
    cv = config.cv if config.source == LOGNORMAL else 0.0
    return Dataset(config, Drawn(config.prompt_tokens, config.output_tokens or 64, cv), corpus)


def _file(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        raise BenchError(f"no dataset {source!r}: there are {', '.join(NAMES)}, and files")
    return path


def bucket_of(prompt_tokens: int, bounds: Sequence[int]) -> str:
    """Return the label of the bucket of a prompt: `<=128`, or `>512` beyond the last bound."""
    above = [bound for bound in bounds if prompt_tokens <= bound]
    return f"<={min(above)}" if above else f">{max(bounds)}"
