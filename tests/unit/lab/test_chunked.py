"""The comparison in virtual time, with services that stall for long prompts as the arms do."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import pytest
from octavo_lab.chunked import ChunkedConfig, ChunkedResult, as_json, as_text, compare
from octavo_lab.command import BenchError
from octavo_lab.datasets.corpus import Corpus
from octavo_lab.load.records import Answer, Outcome, TargetRecord
from octavo_lab.load.target import PlannedRequest, Sink

from tests.unit.lab.virtual import run_virtual

STEP_S = 0.05
LONG_S = 1.0


class Engine:
    """Decodes a step each STEP_S; a long prompt takes LONG_S, in pieces between which others run."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self._busy = asyncio.Lock()

    @property
    def record(self) -> TargetRecord:
        return TargetRecord(kind="test", address="here")

    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        if request.kind == "long":
            for _ in range(self._pieces):
                async with self._busy:
                    await asyncio.sleep(LONG_S / self._pieces)
            sink.chunk()
            return Answer()
        for _ in range(request.output_tokens):
            async with self._busy:
                pass
            await asyncio.sleep(STEP_S)
            sink.chunk()
        return Answer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Failing(Engine):
    async def ask(self, request: PlannedRequest, sink: Sink) -> Answer:
        return Answer(outcome=Outcome.ERROR, reason="PROMPT_TOO_LONG")


def words(count: int) -> Corpus:
    text = " ".join(["word"] * count)
    return Corpus(text, [0, *(5 * index - 1 for index in range(1, count))], seed=1)


CONFIG = ChunkedConfig(long_tokens=600, requests=501, prompt_tokens=8)


def run(chunked: type[Engine] = Engine, config: ChunkedConfig = CONFIG) -> tuple[ChunkedResult, list[str]]:
    told: list[str] = []

    async def go() -> ChunkedResult:
        targets = {"chunked": chunked(pieces=5), "whole": Engine(pieces=1)}
        return await compare(targets, words(5000), config, lambda what, fraction: told.append(what))

    return run_virtual(go()), told


def test_running_requests_wait_for_a_piece_and_not_for_the_whole() -> None:
    found, told = run()
    assert len(found.arms["chunked"].gaps_s) == len(found.arms["whole"].gaps_s) == 501
    # A request that arrives at a decode waits for what is under way, then for its own step.
    assert found.arms["whole"].itl_s.p99 == pytest.approx(LONG_S, rel=0.1)
    assert found.ratio is not None
    assert 0.15 < found.ratio.value < 0.45
    assert found.ratio.low is not None
    assert found.ratio.low <= found.ratio.value
    # The arms take turns, and who comes first changes.
    turns = [what.rpartition(": ")[2] for what in told if what.startswith("turn")]
    assert turns == ["chunked", "whole", "whole", "chunked", "chunked", "whole"]


def test_the_table_and_the_json_tell_it() -> None:
    found, _ = run()
    told = as_text(found)
    assert "P99 with chunks over P99 without: 0." in told
    assert "A prompt of 600 tokens comes each time that 170 of them have ended" in told
    record = as_json(found)
    assert record["arms"]["whole"]["short_requests"] == 501
    assert record["arms"]["whole"]["long_prompts"] == 3
    assert record["arms"]["whole"]["failed"] == 0
    assert record["itl_p99_ratio"]["value"] < 0.65


def test_too_few_requests_give_no_ratio() -> None:
    found, _ = run(config=ChunkedConfig(long_tokens=600, requests=300, prompt_tokens=8))
    assert found.ratio is None
    assert "Too few requests for a P99" in as_text(found)
    assert as_json(found)["itl_p99_ratio"] is None


def test_a_long_prompt_that_fails_is_said() -> None:
    with pytest.raises(BenchError, match="a long prompt fails: PROMPT_TOO_LONG"):
        run(Failing)


@pytest.mark.parametrize(
    "fields", [{"long_tokens": 512}, {"repeats": 0}, {"every": 0}, {"every": 400}, {"output_tokens": 1}]
)
def test_nonsense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(BenchError):
        ChunkedConfig(**fields)  # type: ignore[arg-type]
