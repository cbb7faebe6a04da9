"""Sequences under a grammar: they wait for it alone, and end with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar, cast

import pytest
from octavo.protocol.steps import GRAMMAR_ERROR, FinishReason, StallReason
from octavo.sampling import SamplingParams, StructuredOutput

from tests.unit.worker.driver import Driver, Request, request
from tests.unit.worker.shadow_runner import VOCAB_SIZE, ShadowRunner
from worker_svc.engine.engine import WorkerEngine
from worker_svc.grammar.backend import CompiledGrammar, GrammarError, Mask
from worker_svc.grammar.guide import Grammars, Guide, Makers, Output
from worker_svc.grammar.threads import Threads
from worker_svc.runner.base import StepBatch, StepResult

P = ParamSpec("P")
T = TypeVar("T")
PROMPT = [1, 2, 3, 4, 5]
ANYTHING = StructuredOutput(json_object=True)


class Anything:
    """A grammar that takes every token, and notes them."""

    size_bytes = 0

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def matcher(self, stop_token_ids: object) -> Anything:
        del stop_token_ids
        return self

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True

    def fill(self, mask: Mask) -> None:
        mask[:] = -1


class AtOnce(Threads):
    """Does at once what threads would do."""

    def __init__(self) -> None:
        super().__init__(0, "none")

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        result = super().submit(function, *args, **kwargs)
        call = self._calls.get()
        assert call is not None
        call()
        return result


class HandMade:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.compiled: Future[CompiledGrammar] = Future()

    def guide(self, structured: StructuredOutput, output: Output) -> Guide:
        del structured
        return Guide(self.compiled, output, VOCAB_SIZE, Makers(AtOnce(), AtOnce()))


class ImpatientRunner(ShadowRunner):
    """Says of these handles that their masks came too late."""

    late: frozenset[int] = frozenset()

    def supports(self, sampling: SamplingParams) -> str | None:
        del sampling
        return None

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        tokens = {handle: one for handle, one in result.token_ids.items() if handle not in self.late}
        return StepResult(tokens, result.logprobs, self.late & result.token_ids.keys())


@pytest.fixture
def grammars() -> HandMade:
    return HandMade()


@pytest.fixture
def driver(grammars: HandMade) -> Driver:
    driver = Driver()
    driver.runner = ImpatientRunner(driver.config.block_size)
    driver.engine = WorkerEngine(driver.runner, driver.config, grammars=cast("Grammars", grammars))
    return driver


def constrained(**more: object) -> Request:
    return request(PROMPT, structured=ANYTHING, **more)


def test_sequence_whose_grammar_is_not_ready_waits_before_its_first_token(
    driver: Driver, grammars: HandMade
) -> None:
    one, other = constrained(max_tokens=6), request(PROMPT[::-1], max_tokens=6)
    report = driver.step(one, other)
    assert report.stalled == ((1, StallReason.COMPILING),)
    assert dict(report.prefilled) == {1: len(PROMPT) - 1, 2: len(PROMPT)}
    assert driver.step().stalled == ((1, StallReason.COMPILING),)
    assert len(other.output) == 2, "others go on"

    grammar = Anything()
    grammars.compiled.set_result(grammar)
    assert driver.step().stalled == ()
    driver.finish(one, other)
    assert one.output == driver.expected(one)
    assert grammar.accepted == one.output[:-1]


def test_sequence_that_comes_from_elsewhere_goes_through_its_output_again(
    driver: Driver, grammars: HandMade
) -> None:
    grammar = Anything()
    grammars.compiled.set_result(grammar)
    one = constrained(max_tokens=8)
    driver.step(one)
    driver.step()
    driver.run(driver.plan(release=[1]))
    grammar.accepted.clear()
    had = list(one.output)
    driver.step(one)
    assert grammar.accepted[: len(had)] == had
    driver.finish(one)
    assert one.output == driver.expected(one)


def test_grammar_that_cannot_be_compiled_ends_its_sequence_alone(driver: Driver, grammars: HandMade) -> None:
    one, other = constrained(), request(PROMPT[::-1])
    driver.step(one, other)
    grammars.compiled.set_exception(GrammarError("no such rule"))
    report = driver.step()
    assert [(end.handle, end.reason) for end in report.finished] == [(1, FinishReason.ERROR)]
    (error,) = report.errors
    assert (error.handles, error.kind, error.message) == ((1,), GRAMMAR_ERROR, "no such rule")
    driver.finish(other)
    assert other.output == driver.expected(other)


def test_mask_that_comes_too_late_costs_its_sequence_a_step(driver: Driver, grammars: HandMade) -> None:
    grammars.compiled.set_result(Anything())
    one, other = constrained(), request(PROMPT[::-1])
    driver.step(one, other)
    driver.runner.late = frozenset({1})  # type: ignore[attr-defined]
    had, others = len(one.output), len(other.output)
    report = driver.step()
    assert report.stalled == ((1, StallReason.COMPILING),)
    assert (len(one.output), len(other.output)) == (had, others + 1)
    driver.runner.late = frozenset()  # type: ignore[attr-defined]
    driver.finish(one, other)
    assert one.output == driver.expected(one)


def test_end_of_text_ends_a_sequence_under_a_grammar_whatever_else_it_asks_for(
    driver: Driver, grammars: HandMade
) -> None:
    grammars.compiled.set_result(Anything())
    for seed in range(40):
        one = constrained(max_tokens=16, seed=seed, ignore_eos=True, min_tokens=16)
        driver.finish(one)
        if one.finished is not None and one.finished.reason is FinishReason.STOP:
            assert one.output[-1] == one.finished.stop_token_id
            return
    raise AssertionError("no end of text came up")
