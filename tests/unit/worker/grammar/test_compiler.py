"""Compiling in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from octavo.sampling import StructuredOutput

from worker_svc.grammar import compiler as compilers
from worker_svc.grammar.backend import CompiledGrammar, GrammarError, Vocabulary
from worker_svc.grammar.backends import Backends
from worker_svc.grammar.compiler import CompilerChild, CompilerLost, GrammarCompiler
from worker_svc.runner.sim import byte_level_tokenizer

VOCABULARY = Vocabulary(byte_level_tokenizer(), 259, (2,))
WAIT_S = 120.0
FINE = StructuredOutput(regex="[a-c]{2}")
SLOW = StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}')


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Backends(VOCABULARY), CompilerChild(VOCABULARY))
    yield made
    made.close()


def outcome(grammar: Future[CompiledGrammar]) -> CompiledGrammar | BaseException:
    return grammar.exception(WAIT_S) or grammar.result()


def test_each_constraint_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.get(FINE)
    assert compiler.get(StructuredOutput(regex="[a-c]{2}")) is first
    assert not isinstance(outcome(first), BaseException)


def test_wrong_constraint_is_told_in_the_words_of_the_compiler(compiler: GrammarCompiler) -> None:
    problem = outcome(compiler.get(StructuredOutput(grammar="root ::= foo")))
    assert isinstance(problem, GrammarError)
    assert str(problem) == 'EBNF parser error at line 1, column 10: Rule "foo" is not defined'


def test_compiler_that_dies_or_takes_too_long_is_replaced(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome(compiler.get(FINE))
    process = compiler._child._process
    assert process is not None
    process.kill()
    lost = compiler.get(StructuredOutput(regex="d"))
    assert isinstance(outcome(lost), CompilerLost)
    again = compiler.get(StructuredOutput(regex="d"))
    assert again is not lost
    assert not isinstance(outcome(again), BaseException)

    monkeypatch.setattr(compilers, "ANSWER_LIMIT_S", 0.0)
    assert "takes longer than" in str(outcome(compiler.get(StructuredOutput(regex="e"))))


def test_constraint_that_takes_too_long_to_compile_is_at_fault(compiler: GrammarCompiler) -> None:
    assert "takes longer than" in str(outcome(compiler.get(SLOW)))
    assert not isinstance(outcome(compiler.get(FINE)), BaseException), "others are compiled as before"


def test_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_CACHED", 2)
    first = compiler.get(FINE)
    outcome(first)
    for pattern in ("a", "b"):
        outcome(compiler.get(StructuredOutput(regex=pattern)))
    assert compiler.get(FINE) is not first
