from __future__ import annotations

import itertools
import json
import lzma
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from octavo_lab.command import BenchError
from octavo_lab.datasets import corpus as corpora
from octavo_lab.datasets.corpus import Corpus, open_corpus, token_starts
from octavo_lab.datasets.lengths import Drawn, of_trace, window
from octavo_lab.datasets.load import Dataset, DatasetConfig, bucket_of, load
from octavo_lab.traces import TraceRequest


class Words:
    """A tokenizer of words with the blank before, of which long ones are two tokens."""

    async def pieces(self, text: str) -> list[str]:
        pieces = []
        for word in re.findall(r"\s*\S+", text):
            pieces.extend([word[:6], word[6:]] if len(word) > 6 else [word])
        return pieces


def prose(words: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(words))


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "corpus_text", lambda: prose(20_000))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    # The last of a hundred is far longer than the others.
    for second in range(100):
        tokens = 100_000 if second == 99 else 40 * (second + 1)
        rows.append(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.5000000,{tokens},{second + 1}")
    (tmp_path / "azure_llm_2023_conv.csv").write_text("\n".join(rows))
    hashes = [[1, 2, 3], [1, 2, 4], [5, 6, 7]]
    lines = [
        json.dumps({"timestamp": 500 * at, "input_length": 1300, "output_length": 40, "hash_ids": of})
        for at, of in enumerate(hashes)
    ]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(lines))
    return tmp_path


async def num_tokens(text: str) -> int:
    return len(await Words().pieces(text))


# -- corpus


async def test_windows_have_exactly_as_many_tokens_alone_as_was_asked_for() -> None:
    corpus = await open_corpus(Words(), seed=1)
    for count in (1, 2, 17, 300, 5000):
        text = corpus.window(count)
        assert await num_tokens(text) == count
        assert text.startswith(" ")


async def test_windows_put_together_have_the_sum_of_their_tokens() -> None:
    corpus = await open_corpus(Words(), seed=1)
    text = corpus.window(10) + corpus.window(20) + corpus.window(1)
    assert await num_tokens(text) == 31


async def test_no_window_is_given_twice_while_there_are_others() -> None:
    corpus = await open_corpus(Words(), seed=3)
    windows = [corpus.window(40) for _ in range(5000)]
    assert len(set(windows)) == 5000


async def test_a_seed_gives_the_same_windows_and_another_others() -> None:
    first, again, other = [await open_corpus(Words(), seed) for seed in (1, 1, 2)]
    assert first.window(50) == again.window(50) != other.window(50)


async def test_a_tokenizer_of_characters_has_windows_of_every_length() -> None:
    class Characters:
        async def pieces(self, text: str) -> list[str]:
            return list(text)

    corpus = await open_corpus(Characters(), seed=1)
    assert [len(corpus.window(tokens)) for tokens in (1, 2, 3, 50)] == [1, 2, 3, 50]


async def test_a_small_corpus_begins_again_and_an_impossible_window_is_refused() -> None:
    corpus = await open_corpus(Words(), 1, "Once upon a time there was a fox.")
    assert {corpus.window(2) for _ in range(50)} <= {
        " upon a",
        " a time",
        " time there",
        " there was",
        " was a",
        " a fox.",
    }
    assert corpus.window(0) == ""
    with pytest.raises(BenchError, match="the corpus has 8"):
        corpus.window(9)


async def test_a_long_text_is_split_in_parts_without_a_seam() -> None:
    text = prose(30_000)
    corpus = await open_corpus(Words(), 1, text)
    assert corpus.num_tokens == await num_tokens(text)


def test_token_starts_take_pieces_with_and_without_their_blanks() -> None:
    text = "Hello  big world"
    assert token_starts(text, ["Hello", "  big", " world"]) == [0, 5, 10]
    assert token_starts(text, ["Hello", "big", "wor", "ld"]) == [0, 5, 10, 14]
    with pytest.raises(BenchError, match="not those of the text"):
        token_starts(text, ["Hello", "small"])


def test_the_corpus_is_prose_of_some_size() -> None:
    text = Path(corpora.__file__).with_name("corpus.txt.xz").read_bytes()
    words = lzma.decompress(text).decode().split()
    assert len(words) > 20_000
    assert len(set(words)) > 3_000
    assert all(" " <= char <= "~" for word in words for char in word)


# -- lengths


def test_a_trace_is_divided_by_the_least_whole_number_that_makes_99_percent_fit(traces: Path) -> None:
    lengths = of_trace("azure-conv", 1008, folder=traces)
    # The 99th total is 3960 + 99 tokens, and 1000 are to be had.
    assert lengths.scale == 5
    assert len(lengths.arrivals) == 99
    assert lengths.arrivals[9] == TraceRequest(pytest.approx(9.0), 80, 2)
    assert lengths.description == "azure-conv, lengths divided by 5, 1 of 100 left out"


def test_a_trace_that_fits_stays_as_it_is(traces: Path) -> None:
    assert of_trace("azure-conv", 200_000, folder=traces).scale == 1
    assert of_trace("azure-conv", 200_000, scale=10, folder=traces).arrivals[0].prompt_tokens == 4
    with pytest.raises(BenchError, match="nothing of azure-conv fits"):
        of_trace("azure-conv", 10, scale=1, folder=traces)


def test_windows_of_a_trace_are_in_a_row_and_go_around() -> None:
    arrivals = [TraceRequest(float(at), at + 1, 1) for at in range(10)]
    taken = [one.prompt_tokens for one in window(arrivals, 25, seed=2)]
    assert len(taken) == 25
    assert all((later - earlier) % 10 == 1 for earlier, later in itertools.pairwise(taken))


def test_drawn_lengths_have_the_stated_mean_and_variation() -> None:
    drawn = Drawn(200, 50, 0.8).draw(20_000, 100_000, seed=1)
    prompts = [one.prompt_tokens for one in drawn]
    assert statistics.mean(prompts) == pytest.approx(200, rel=0.03)
    assert statistics.stdev(prompts) / statistics.mean(prompts) == pytest.approx(0.8, rel=0.05)
    assert statistics.mean(one.output_tokens for one in drawn) == pytest.approx(50, rel=0.03)


def test_drawn_lengths_fit_the_context() -> None:
    drawn = Drawn(200, 50, 2.0).draw(1000, 512, seed=1)
    assert max(one.prompt_tokens + one.output_tokens for one in drawn) <= 504
    assert {(one.prompt_tokens, one.output_tokens) for one in Drawn(9, 3).draw(5, 512, 1)} == {(9, 3)}
    with pytest.raises(BenchError, match="does not fit"):
        Drawn(600, 50).draw(1, 512, 1)


# -- datasets


def config(source: Any, **fields: Any) -> DatasetConfig:
    return DatasetConfig(source=str(source), **{"context": 4096, **fields})


async def opened(source: Any, **fields: Any) -> Dataset:
    return await load(config(source, **fields), Words())


async def test_prompts_of_a_trace_have_its_lengths(traces: Path) -> None:
    dataset = await opened("azure-conv", traces=traces, buckets=(1000, 2000))
    requests = dataset.requests(30)
    assert [await num_tokens(str(one.prompt)) for one in requests] == [one.prompt_tokens for one in requests]
    assert {one.kind for one in requests} <= {"<=1000", "<=2000", ">2000"}
    assert dataset.at_s is not None
    assert len(dataset.in_order()) == len(dataset.at_s) == 99
    assert dataset.description.startswith("azure-conv, lengths divided by 1, 1 of 100 left out; prompts from")


async def test_prompts_share_prefixes_where_the_trace_says_so(traces: Path) -> None:
    dataset = await opened("mooncake", traces=traces, scale=4)
    first, second, third = dataset.in_order()
    assert [one.prompt_tokens for one in (first, second, third)] == [325] * 3
    assert [await num_tokens(str(one.prompt)) for one in (first, second, third)] == [325] * 3
    # Two blocks of 512 / 4 tokens are the same.
    shared = await Words().pieces(str(first.prompt))
    other = await Words().pieces(str(second.prompt))
    common = next(at for at, (a, b) in enumerate(zip(shared, other, strict=True)) if a != b)
    assert common >= 256
    assert str(third.prompt)[:50] != str(first.prompt)[:50]


async def test_drawing_again_gives_the_same_requests() -> None:
    first = (await opened("lognormal", prompt_tokens=60)).requests(20)
    assert first == (await opened("lognormal", prompt_tokens=60)).requests(20)
    assert first != (await opened("lognormal", prompt_tokens=60, seed=2)).requests(20)


async def test_fixed_lengths_have_no_times() -> None:
    dataset = await opened("fixed", prompt_tokens=12, output_tokens=5)
    assert dataset.at_s is None
    assert {(one.prompt_tokens, one.output_tokens) for one in dataset.requests(4)} == {(12, 5)}
    with pytest.raises(BenchError, match="no times"):
        dataset.in_order()


async def test_json_lines_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {
            "prompt": "two words",
            "output_tokens": 9,
            "timestamp": 3,
            "kind": "a",
            "options": {"priority": "batch"},
        },
        {"prompt": [1, 2, 3], "timestamp": 4.5},
        {"messages": [{"role": "user", "content": "one two three"}], "timestamp": 5},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    dataset = await opened(path, output_tokens=7)
    text, tokens, chat = dataset.requests(3)
    assert (text.prompt, text.prompt_tokens, text.output_tokens, text.kind) == ("two words", 2, 9, "a")
    assert text.options == {"priority": "batch"}
    assert (tokens.prompt, tokens.prompt_tokens, tokens.output_tokens) == ([1, 2, 3], 3, 7)
    assert chat.prompt_tokens == 3
    assert dataset.at_s == (3.0, 4.5, 5.0)
    with pytest.raises(BenchError, match="has 3 requests, and 4 are needed"):
        dataset.requests(4)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c"])
async def test_only_a_newline_ends_a_json_line(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "mine.jsonl"
    prompt = f"one{separator}two"
    # A form feed is escaped in JSON, whoever writes it; the others need not be.
    line = json.dumps({"prompt": prompt, "output_tokens": 3}, ensure_ascii=False)
    path.write_text(f"{line}\r\n{line}\n", encoding="utf-8", newline="")
    assert [one.prompt for one in (await opened(path)).requests(2)] == [prompt] * 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "mine.jsonl:1"),
        ("3", "mine.jsonl:1"),
        ('{"output_tokens": 3}', "has no prompt"),
        ('{"prompt": "a"}', "--output-tokens"),
        ('{"prompt": "a", "output_tokens": 0}', "at least 1"),
        ('{"prompt": [{}], "output_tokens": 1}', "role and content"),
        ('{"prompt": "a", "output_tokens": 1, "options": 3}', "options must be an object"),
        (
            '{"prompt": "a", "output_tokens": 1, "timestamp": 1}\n{"prompt": "a", "output_tokens": 1}',
            "timestamp",
        ),
        ("", "has no requests"),
        ("[3]", "ShareGPT"),
        ("[", "ShareGPT"),
    ],
)
async def test_a_wrong_file_is_refused_by_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(line)
    with pytest.raises(BenchError, match=problem):
        await opened(path)


async def test_share_gpt_asks_what_the_first_person_said(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    rows = [
        {
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "What is it?"},
                {"from": "gpt", "value": "It is a fox."},
                {"from": "human", "value": "Really?"},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "Nobody asked."}]},
    ]
    path.write_text(json.dumps(rows))
    (request,) = (await opened(path)).requests(1)
    assert (request.prompt, request.prompt_tokens, request.output_tokens) == ("What is it?", 3, 4)


async def test_an_unknown_dataset_is_refused_with_what_there_is() -> None:
    with pytest.raises(BenchError, match="azure-conv, azure-code, mooncake, lognormal, fixed, and files"):
        await opened("wildchat")


def test_buckets_are_named_by_their_upper_bound() -> None:
    assert [bucket_of(tokens, (128, 512)) for tokens in (1, 128, 129, 513)] == [
        "<=128",
        "<=128",
        "<=512",
        ">512",
    ]


def test_corpus_of_nothing_but_one_word_has_no_windows() -> None:
    with pytest.raises(BenchError, match="no prompt of 1 tokens"):
        Corpus("word", [0], 1).window(1)
