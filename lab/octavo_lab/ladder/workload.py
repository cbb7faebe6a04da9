"""What the ladder asks: lengths of a dataset, prompts of real text, some of which begin alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from octavo import AsyncClient

from octavo_lab.datasets.corpus import open_corpus
from octavo_lab.datasets.load import NAMES, Dataset, DatasetConfig, load
from octavo_lab.datasets.tokenizers import ServiceTokenizer, Tokenizer
from octavo_lab.ladder.config import LadderConfig
from octavo_lab.load.target import PlannedRequest
from octavo_lab.traces import TRACES

_PROMPTS: Final = "; prompts"
"""Where the description of a dataset begins to tell of prompts and its own seed."""
_SAMPLE: Final = 500
"""Requests whose mean lengths are recorded."""
_OWN_TOKENS: Final = 8
"""Tokens of a prompt that are its own, at least, beside a system prompt that it shares."""


class Workload:
    """Requests that a seed determines, the same for every arm.

    A part begins, as real ones do, with one of a few system prompts: only a prefix cache can use that.
    """

    _tokenizer: Tokenizer
    """As `split_with` has it."""

    def __init__(self, config: LadderConfig) -> None:
        self.record: dict[str, Any] = {"source": config.dataset}
        """What is needed to judge it and to repeat it."""
        self._config = config
        self._made: dict[int, list[PlannedRequest]] = {}
        # Prompts of files are what they are, and those of Mooncake share what the trace says.
        synthetic = config.dataset in NAMES and config.dataset != "mooncake"
        self._shares = synthetic and config.shared_prefix_share > 0

    @property
    def description(self) -> str:
        """Where the requests come from, in words."""
        return str(self.record.get("description", self._config.dataset))

    async def prepare(self, endpoint: str) -> None:
        """Split texts as the service under test does; BenchError: no such dataset, or it does not fit."""
        async with AsyncClient(endpoint) as client:
            model = (await client.models())[0].id
            await self.split_with(ServiceTokenizer(client, model))

    def requests(self, seed: int, count: int) -> Sequence[PlannedRequest]:
        """Return so many requests; those of a larger count begin with those of a smaller one."""
        made = self._made.get(seed, [])
        if len(made) < count:
            # More than asked for, so that what comes next has them ready.
            self._made[seed] = made = asyncio.run(self._make(seed, max(count, 2 * len(made))))
        return made[:count]

    async def split_with(self, tokenizer: Tokenizer) -> None:
        """Split all texts now; the tokenizer is not asked again. Raises as `prepare` does."""
        self._tokenizer, config = _Remembering(tokenizer), self._config
        described = (await self._dataset(config.seed)).description
        sample = await self._make(config.seed, _SAMPLE) if config.dataset in NAMES else []
        if sample:
            described = f"{described.partition(_PROMPTS)[0]}, a window per seed; prompts from Octavo's corpus"
            self.record["sample"] = {
                "requests": len(sample),
                "prompt_tokens": fmean(one.prompt_tokens for one in sample),
                "output_tokens": fmean(one.output_tokens for one in sample),
            }
        if self._shares:
            described += (
                f"; {config.shared_prefix_share:.0%} of the prompts begin with one of "
                f"{config.num_shared_prefixes} system prompts of {config.shared_prefix_tokens} tokens, where "
                "they are long enough"
            )
        self.record["description"] = described

    async def _dataset(self, seed: int) -> Dataset:
        config = self._config
        return await load(
            DatasetConfig(
                source=config.dataset,
                context=config.context,
                prompt_tokens=config.prompt_tokens,
                output_tokens=config.output_tokens,
                cv=config.length_cv,
                scale=config.scale if config.dataset in TRACES else None,
                traces=Path(config.traces) if config.traces else None,
                seed=seed,
            ),
            self._tokenizer,
        )

    async def _make(self, seed: int, count: int) -> list[PlannedRequest]:
        requests = (await self._dataset(seed)).requests(count)
        if not self._shares:
            return requests
        config, rng = self._config, random.Random(seed)
        # Of the experiment's seed: the same system prompts in all of it. The rest of a prompt is its own.
        texts = await open_corpus(self._tokenizer, config.seed)
        prefixes = [texts.window(config.shared_prefix_tokens) for _ in range(config.num_shared_prefixes)]
        corpus = await open_corpus(self._tokenizer, seed + 1)
        made = []
        for one in requests:
            drawn, which = rng.random(), rng.randrange(len(prefixes))
            own = one.prompt_tokens - config.shared_prefix_tokens
            shares = drawn < config.shared_prefix_share and own >= _OWN_TOKENS
            made.append(replace(one, prompt=prefixes[which] + corpus.window(own)) if shares else one)
        return made


class _Remembering:
    """Asks a tokenizer about each text once: all of them are split while the service is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[str]] = {}

    async def pieces(self, text: str) -> list[str]:
        """Split; see `octavo_lab.datasets.tokenizers.Tokenizer`."""
        if text not in self._known:
            self._known[text] = await self._tokenizer.pieces(text)
        return self._known[text]
