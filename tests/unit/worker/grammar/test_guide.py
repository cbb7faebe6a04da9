"""What holds one output to its grammar."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from octavo.sampling import StructuredOutput
from tokenizers import Tokenizer

from worker_svc.grammar import guide as guides
from worker_svc.grammar.backend import CompiledGrammar, GrammarError, Mask, Vocabulary, allowed_ids
from worker_svc.grammar.backends import Backends
from worker_svc.grammar.guide import Guide, Makers, Output, late_of
from worker_svc.grammar.threads import Threads
from worker_svc.runner.sim import byte_level_tokenizer

EOS = 2
TOKENIZER = Tokenizer.from_str(byte_level_tokenizer())
SIZE = TOKENIZER.get_vocab_size()
"""No whole number of the words of a mask."""
WORD = StructuredOutput(regex="[a-c]{2,3}")


@pytest.fixture(scope="module")
def backends() -> Backends:
    return Backends(Vocabulary(byte_level_tokenizer(), SIZE, (EOS,)))


@pytest.fixture
def makers() -> Iterator[Makers]:
    made = Makers(Threads(1, "masks"), Threads(1, "beginnings"))
    yield made
    made.close()


def done(grammar: CompiledGrammar) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_result(grammar)
    return future


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


class Under:
    """Makes guides and waits for their masks."""

    def __init__(self, backends: Backends, makers: Makers) -> None:
        self._backends = backends
        self._makers = makers

    def guide(self, structured: StructuredOutput, text: str = "", min_tokens: int = 0) -> Guide:
        grammar = self.compiled(structured)
        return self.settled(Guide(grammar, Output(ids(text), (EOS,), min_tokens), SIZE, self._makers))

    def compiled(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        return done(self._backends.of(structured).compile(structured))

    @staticmethod
    def settled(guide: Guide) -> Guide:
        late_of([guide], alone=True)
        return guide

    def advance(self, guide: Guide, token_id: int) -> None:
        guide.advance(token_id)
        self.settled(guide)


@pytest.fixture
def under(backends: Backends, makers: Makers) -> Under:
    return Under(backends, makers)


def shown(guide: Guide) -> str:
    """The characters that may come next; $ is the end."""
    return "".join(sorted("$" if one == EOS else TOKENIZER.decode([one]) for one in allowed_ids(guide.mask)))


def test_output_may_end_where_its_grammar_does_and_must_at_its_end(under: Under) -> None:
    assert [shown(under.guide(WORD, text)) for text in ("", "a", "ab", "abc")] == ["abc", "abc", "$abc", "$"]


def test_no_token_beyond_the_vocabulary_is_allowed(under: Under) -> None:
    for text in ("", '{"', '{"a'):
        assert max(allowed_ids(under.guide(StructuredOutput(json_object=True), text).mask)) < SIZE


def test_min_tokens_keep_it_going_as_far_as_the_grammar_lets_them(under: Under) -> None:
    found = [shown(under.guide(WORD, text, min_tokens=8)) for text in ("a", "ab", "abc")]
    assert found == ["abc", "abc", "$"]


def test_guide_made_anew_from_the_output_goes_on_as_the_first_would(under: Under) -> None:
    schema = StructuredOutput(json_schema='{"type": "array", "items": {"enum": ["é", {"a": null}, 12.5]}}')
    chooser = random.Random(5)
    first, output = under.guide(schema), list[int]()
    for _ in range(80):
        again = under.guide(schema, TOKENIZER.decode(output)) if _is_text(output) else first
        assert again.mask.tolist() == first.mask.tolist()
        token_id = int(chooser.choice(allowed_ids(first.mask)))
        if token_id == EOS:
            break
        output.append(token_id)
        under.advance(first, token_id)


def _is_text(output: list[int]) -> bool:
    return ids(TOKENIZER.decode(output)) == output


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        (StructuredOutput(choice=('a"b', "line\nbreak")), ['a"b', "line\nbreak"]),
        (StructuredOutput(json_object=True, compact=True), ['{"a":[{}]}']),
        (StructuredOutput(grammar='root ::= "(" root ")" | "x"'), ["((x))"]),
        (
            StructuredOutput(
                structural_tag='{"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": '
                '"</f>"}], "triggers": ["<f"]}'
            ),
            ["see <f>12</f> there"],
        ),
    ],
)
def test_every_kind_of_constraint_takes_what_it_means(
    under: Under, structured: StructuredOutput, texts: list[str]
) -> None:
    for text in texts:
        assert EOS in allowed_ids(under.guide(structured, text).mask)


@pytest.mark.parametrize(
    ("structured", "text", "problem"),
    [
        (WORD, "ax", "output token 1 .* does not follow the grammar"),
        (StructuredOutput(json_schema='{"$ref": "#"}'), "", "allows no token"),
    ],
)
def test_output_that_cannot_go_on_says_why(
    under: Under, structured: StructuredOutput, text: str, problem: str
) -> None:
    guide = under.guide(structured, text)
    assert not guide.ready
    assert guide.problem is not None
    with pytest.raises(GrammarError, match=problem):
        raise GrammarError(guide.problem)


class Endless:
    """A grammar that never says what may come next, unless the test lets it."""

    size_bytes = 0

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def matcher(self, stop_token_ids: object) -> Endless:
        del stop_token_ids
        return self

    def accept(self, token_id: int) -> bool:
        del token_id
        return True

    def fill(self, mask: Mask) -> None:
        self.let_go.wait()
        mask[:] = -1


def test_grammar_that_holds_its_thread_ends_its_own_sequence_only(
    under: Under, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Endless()
    stuck = Guide(done(grammar), Output((), (EOS,)), SIZE, makers)
    waiting = Guide(under.compiled(WORD), Output((), (EOS,)), SIZE, makers)
    assert late_of([stuck, waiting], alone=False) == [True, True]
    assert stuck.missed
    assert stuck.problem is None

    monkeypatch.setattr(guides, "MASK_LIMIT_S", 0.0)
    assert "takes longer than" in (stuck.problem or "")
    assert late_of([waiting], alone=True) == [False], "another thread has taken over"
    grammar.let_go.set()
