from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from octavo._sdk import requests
from octavo.batch_file import BatchFileError, OutcomeFile, read_requests, throughput_order
from octavo.errors import InvalidRequestError
from octavo.protocol.steps import FinishReason, TokenLogprobs
from octavo.types import Choice, GenerateResult


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def _result(text: str) -> GenerateResult:
    return GenerateResult("r", (Choice(0, text, (1,), FinishReason.STOP),), seed=1)


def test_requests_of_both_formats_are_read_with_their_options(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        {"prompt": "Hi", "max_tokens": 5},
        {"id": "b", "prompt": [1, 2]},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 7},
        },
    )
    first, second, third = read_requests(path, {})
    assert first.request_id == "1"
    assert first.item is not None
    assert (first.item.input, dict(first.item.options)) == ("Hi", {"max_tokens": 5})
    assert second.item is not None
    assert (second.request_id, second.item.input, second.item.is_chat) == ("b", [1, 2], False)
    assert third.item is not None
    assert (third.request_id, third.item.is_chat) == ("c", True)
    assert dict(third.item.options) == {"max_tokens": 7}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": \n', "line 1"),
        ("[]\n", "not an object"),
        ("{}\n", "one of prompt and messages"),
        ('{"prompt": 5}\n', "prompt"),
        ('{"prompt": ["a"]}\n', "prompt"),
        ('{"messages": "a"}\n', "messages"),
        ('{"prompt": "a", "messages": []}\n', "one of prompt and messages"),
    ],
)
def test_requests_with_a_bad_line_keep_the_others_and_name_what_is_wrong(
    tmp_path: Path, line: str, named: str
) -> None:
    bad, good = read_requests(_file(tmp_path, line, {"prompt": "fine"}), {})
    assert bad.item is None
    assert named in str(bad.error)
    assert good.item is not None


def test_requests_with_one_id_twice_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    with pytest.raises(BatchFileError, match="lines 1 and 2"):
        read_requests(path, {})


def test_order_keeps_common_prefixes_together_and_long_ones_first(tmp_path: Path) -> None:
    system = "You are a helpful assistant. " * 20
    path = _file(
        tmp_path,
        {"id": "short", "prompt": "Hi"},
        {"id": "a", "prompt": system + "x"},
        {"id": "long", "prompt": "Tell me " + "more " * 1000},
        {"id": "b", "prompt": system + "y" * 200},
    )
    assert [line.request_id for line in throughput_order(read_requests(path, {}))] == [
        "long",
        "b",
        "a",
        "short",
    ]


def test_outcomes_of_an_interrupted_run_are_not_made_again(tmp_path: Path) -> None:
    lines = read_requests(_file(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}), {})
    path = tmp_path / "out.jsonl"
    with OutcomeFile(path) as outcomes:
        assert outcomes.unfinished(lines) == lines
        outcomes.add(lines[1], _result("B"))
    with path.open("a") as file:
        file.write('{"id": "3", "dig')
    with OutcomeFile(path) as outcomes:
        assert [line.number for line in outcomes.unfinished(lines)] == [1, 3]
        outcomes.add(lines[0], _result("A"))
        outcomes.add(lines[2], _result("C"))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((record["line"], record["choices"][0]["text"]) for record in written) == [
        (1, "A"),
        (2, "B"),
        (3, "C"),
    ]


def test_outcomes_of_a_request_that_has_changed_are_not_taken_for_its_own(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = read_requests(_file(tmp_path, {"id": "q", "prompt": "a"}), {})
    with OutcomeFile(path) as outcomes:
        outcomes.add(before[0], _result("A"))
    after = read_requests(_file(tmp_path, {"id": "q", "prompt": "b"}), {})
    with OutcomeFile(path) as outcomes, pytest.raises(BatchFileError, match=r"'q' \(line 1\) has changed"):
        outcomes.unfinished(after)


def test_outcomes_are_not_appended_to_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(BatchFileError, match="line 1 is not an outcome"):
        OutcomeFile(path)
    assert path.read_text() == "dear diary\n"


def test_requests_of_the_openai_format_mean_what_they_mean_there(tmp_path: Path) -> None:
    schema = {"type": "object"}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]},
        ],
        "logit_bias": {"7": -1.5},
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "user": "u",
        "seed": None,
    }
    nothing = {"prompt": "a", "logprobs": False, "top_logprobs": None, "response_format": {"type": "text"}}
    first, second = read_requests(_file(tmp_path, {"custom_id": "c", "body": body}, nothing), {})

    assert first.item is not None
    assert first.item.input == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "t"}]},
    ]
    request = requests.batch_request(first.item, {})
    assert dict(request.sampling.logit_bias) == {7: -1.5}
    assert request.sampling.logprobs == 3
    assert json.loads(request.sampling.structured.json_schema) == schema
    assert second.item is not None
    assert dict(second.item.options) == {}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content"),
    ],
)
def test_requests_that_ask_for_what_there_is_not_name_it(
    tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    (line,) = read_requests(_file(tmp_path, fields), {})
    assert line.item is None
    assert re.search(named, str(line.error))


def test_outcomes_made_with_other_options_are_not_taken_for_those_of_this_run(tmp_path: Path) -> None:
    path, requests = tmp_path / "out.jsonl", _file(tmp_path, {"prompt": "a"})
    with OutcomeFile(path) as outcomes:
        outcomes.add(read_requests(requests, {"max_tokens": 5})[0], _result("A"))
    with OutcomeFile(path) as outcomes:
        assert outcomes.unfinished(read_requests(requests, {"max_tokens": 5})) == []
        with pytest.raises(BatchFileError, match="options of the command"):
            outcomes.unfinished(read_requests(requests, {"max_tokens": 6}))


def test_outcomes_have_the_logprobs_that_were_asked_for(tmp_path: Path) -> None:
    (line,) = read_requests(_file(tmp_path, {"prompt": "a", "logprobs": 1}), {})
    position = TokenLogprobs(5, -0.5, 1, (5,), (-math.inf,), b"A", (b"A",))
    choice = Choice(0, "A", (5,), FinishReason.STOP, logprobs=(position,))
    with OutcomeFile(tmp_path / "out.jsonl") as outcomes:
        outcomes.add(line, GenerateResult("r", (choice,), seed=1))

    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    best = {"token_id": 5, "token": "A", "logprob": -9999.0}
    assert record["choices"][0]["logprobs"] == [{**best, "logprob": -0.5, "top_logprobs": [best]}]


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "\\ud83d", "prompt": 5}',
        '{"id": "deep", "prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"id": "vars", "messages": [{"role": "user", "content": "x"}], "template_vars": ["abc"]}',
        '{"id": "half", "prompt": "\\ud83d"}',
        '{"id": "big", "prompt": "x", "seed": 1e999}',
        '{"id": "kind", "prompt": "x", "max_tokens": {"a": 1}}',
    ],
    ids=lambda line: line[:20],
)
def test_bad_line_is_its_own_error_and_the_good_ones_are_done(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path, '{"prompt": "good"}\n', line + "\n", '{"prompt": "good, too"}\n')
    first, bad, last = read_requests(path, {})
    with OutcomeFile(tmp_path / "out.jsonl") as outcomes:
        outcomes.add(first, _result("A"))
        outcomes.add(last, _result("B"))
        error = bad.error
        if bad.item is not None:
            with pytest.raises(InvalidRequestError) as raised:
                requests.batch_request(bad.item, {})
            error = raised.value
        assert error is not None
        outcomes.add(bad, error)

    records = [json.loads(record) for record in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["error" in record for record in records] == [False, False, True]
    with OutcomeFile(tmp_path / "out.jsonl") as outcomes:
        assert outcomes.unfinished([first, bad, last]) == [bad]


def test_file_is_left_as_it_was_until_there_is_an_outcome(tmp_path: Path) -> None:
    line = read_requests(_file(tmp_path, {"prompt": "a"}), {})[0]
    path = tmp_path / "out.jsonl"
    with OutcomeFile(path) as outcomes:
        outcomes.add(line, _result("A"))
    torn = path.read_text() + '{"id": "2", "li'
    path.write_text(torn)

    with OutcomeFile(path):
        pass
    assert path.read_text() == torn
    with OutcomeFile(path) as outcomes:
        outcomes.add(line, _result("B"))
    assert [json.loads(record)["id"] for record in path.read_text().splitlines()] == ["1", "1"]


@pytest.mark.parametrize("content", ["notes without a line break", '{"key": 1}', "x\n"])
def test_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)

    with pytest.raises(BatchFileError, match="not an outcome of a batch"):
        OutcomeFile(path)
    assert path.read_text() == content
