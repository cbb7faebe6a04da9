"""What settings are tried with: requests of a dataset, as a service is asked them or as lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo import AsyncClient

from octavo_lab.command import BenchError
from octavo_lab.datasets import lengths
from octavo_lab.datasets.load import DatasetConfig, load
from octavo_lab.datasets.tokenizers import ServiceTokenizer
from octavo_lab.load.target import PlannedRequest
from octavo_lab.traces import TRACES


@dataclass(slots=True)
class Asking:
    """Requests of a dataset, the same in every trial."""

    source: str
    context: int | None = None
    scale: int | None = None
    traces: Path | None = None
    seed: int = 1
    description: str = ""
    _made: list[PlannedRequest] = field(default_factory=list)

    async def prepare(self, endpoint: str, count: int) -> None:
        """Make the requests, with the tokenizer of the service under test.

        Raises:
            BenchError: there is no such dataset, or it does not fit.
        """
        if not self._made:
            self._made = await self._make(endpoint, count)

    def requests(self, count: int) -> Sequence[PlannedRequest]:
        """Return so many; the same each time."""
        return self._made[:count]

    def lengths(self, count: int, context: int) -> list[tuple[int, int]]:
        """Return (prompt tokens, output tokens) of so many requests of a trace.

        Raises:
            BenchError: the dataset is no trace.
        """
        if self.source not in TRACES:
            raise BenchError(f"a simulation takes the lengths of a trace ({', '.join(TRACES)})")
        trace = lengths.of_trace(self.source, self.context or context, scale=self.scale, folder=self.traces)
        window = lengths.window(trace.arrivals, count, self.seed)
        return [(one.prompt_tokens, one.output_tokens) for one in window]

    async def _make(self, endpoint: str, count: int) -> list[PlannedRequest]:
        async with AsyncClient(endpoint) as client:
            model = (await client.models())[0]
            context = min(self.context or model.max_model_len, model.max_model_len)
            config = DatasetConfig(
                source=self.source, context=context, scale=self.scale, traces=self.traces, seed=self.seed
            )
            dataset = await load(config, ServiceTokenizer(client, model.id))
            self.description = dataset.description
            return dataset.requests(count)
