"""`octavo bench serve` and `compare`, as one types them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from octavo.cli.main import main
from octavo_lab import compare
from octavo_lab.command import BenchError
from octavo_lab.datasets import corpus as corpora
from octavo_lab.load import files
from octavo_lab.load.arrivals import Bursty, Closed, Even, Gamma, Poisson, Replay
from octavo_lab.load.records import Outcome, RunRecord, TrafficRecord
from octavo_lab.load.summary import ANSWERED, Slo
from octavo_lab.load.tables import as_text, compared, differences
from octavo_lab.serve import command as serve
from octavo_lab.serve.plan import parse_options, parse_slo, traffic

from tests.unit.client.fake_scheduler import ThreadedScheduler
from tests.unit.lab.runs import request, run


@pytest.fixture
def scheduler() -> Iterator[ThreadedScheduler]:
    one = ThreadedScheduler()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = corpora.corpus_text()[:40_000]
    monkeypatch.setattr(corpora, "corpus_text", lambda: text)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return parser.parse_args(words)


SHORT = ("--dataset", "fixed", "--prompt-tokens", "40", "--output-tokens", "6")


def test_a_run_is_told_and_written(
    scheduler: ThreadedScheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "a.json"
    words = ["--endpoint", scheduler.fake.endpoint, "--rate", "400", "--requests", "60", "--name", "ours"]
    code = main(
        ["bench", "serve", *words, *SHORT, "--slo", "ttft=60000", "--buckets", "64", "--out", str(path)]
    )
    told = capsys.readouterr().out
    assert code == 0
    assert "60: 60 answered" in told
    assert "fixed, 40 tokens in, 6 out; prompts from Octavo's corpus, seed 1" in told
    assert "100.0% (TTFT 60000 ms)" in told
    assert "no P99 from fewer than 500 requests" in told
    record = files.read(path)
    assert record.name == "ours"
    assert json.loads(path.read_text())["environment"]["hardware"]["cores"] >= 1
    assert [one.outcome for one in record.requests] == [Outcome.OK] * 60
    assert {one.output_tokens for one in record.requests} == {6}
    assert {one.offered.kind for one in record.requests} == {"<=64"}
    assert len({len(sent.text) for sent in scheduler.fake.requests}) == 1
    assert len({sent.text for sent in scheduler.fake.requests}) == 60


def test_figures_as_json(scheduler: ThreadedScheduler, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--endpoint", scheduler.fake.endpoint, "--concurrency", "3", "--requests", "5", "--json"]
    assert main(["bench", "serve", *words, *SHORT]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["outcomes"]["ok"] == 5
    assert summary["e2e_s"]["p99"] is None


def test_an_interrupt_leaves_what_there_is(scheduler: ThreadedScheduler, tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    scheduler.run(scheduler.fake.hold)
    words = [
        "--endpoint",
        scheduler.fake.endpoint,
        "--concurrency",
        "2",
        "--requests",
        "9",
        "--out",
        str(path),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", "bench", "serve", *words, *SHORT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        scheduler.until(lambda: scheduler.fake.most_live == 2)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Interrupted" in told
    record = files.read(path)
    assert record.interrupted
    assert [one.outcome for one in record.requests] == [Outcome.ABANDONED] * 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rate", "1", "--requests", "0"], "at least one request"),
        ([], "--rate, --concurrency, or --arrivals replay"),
        (["--rate", "-1"], "rate must be positive"),
        (["--rate", "1", "--slo", "p99=3"], "ttft, tpot or e2e"),
        (["--rate", "1", "--option", "priority"], "NAME=VALUE"),
        (["--rate", "1", "--option", "foo=1"], "unknown option 'foo'"),
        (["--rate", "1", "--option", "deadline=5s"], "deadline='5s'"),
        (["--rate", "1", "--option", "priority=urgent"], "one of interactive, standard, batch"),
        (["--rate", "1", "--option", "top_k=-3"], "top_k"),
        (["--rate", "1", "--dataset", "nothing"], "no dataset 'nothing'"),
        (["--rate", "1", "--buckets", "a"], "not made of numbers"),
        (["--rate", "1", "--model", "other"], "there are fake"),
        (["--rate", "0.001", "--duration", "0.1"], "nothing to send"),
        (["--arrivals", "replay"], "nothing to replay"),
        (["--rate", "1", "--prompt-tokens", "4000"], "does not fit a context of 2048"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    scheduler: ThreadedScheduler, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    command = ["bench", "serve", "--endpoint", scheduler.fake.endpoint]
    assert main([*command, *SHORT, *words]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_options_of_a_file_are_looked_at_before_the_run(
    scheduler: ThreadedScheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": "a", "output_tokens": 2}, {"prompt": "b", "output_tokens": 2, "options": {"foo": 1}}]
    path.write_text("\n".join(map(json.dumps, rows)))
    command = ["bench", "serve", "--endpoint", scheduler.fake.endpoint, "--rate", "100"]
    assert main([*command, "--dataset", str(path), "--requests", "2"]) == 2
    assert "unknown option 'foo'" in capsys.readouterr().err
    assert scheduler.fake.requests == []


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    scheduler: ThreadedScheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    command = ["bench", "serve", "--endpoint", scheduler.fake.endpoint, "--rate", "100", *SHORT]
    for path in (tmp_path, tmp_path / "file" / "a.json"):
        assert main([*command, "--out", str(path)]) == 2
        assert str(tmp_path) in capsys.readouterr().err
    assert scheduler.fake.requests == []


def test_figures_are_told_even_if_the_file_cannot_be_written_any_more(
    scheduler: ThreadedScheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: Any) -> None:
        raise BenchError("no space left on device")

    monkeypatch.setattr(files, "write", full)
    command = ["bench", "serve", "--endpoint", scheduler.fake.endpoint, "--rate", "400", "--requests", "5"]
    assert main([*command, *SHORT, "--out", str(tmp_path / "a.json")]) == 2
    told = capsys.readouterr()
    assert "5: 5 answered" in told.out
    assert "no space left" in told.err


@pytest.mark.parametrize(
    "words",
    [
        ["ladder", "--out"],
        ["overload", "--out"],
        ["fleet", "--out"],
        ["fragmentation", "--plot"],
    ],
)
def test_no_bench_runs_for_results_that_cannot_be_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", *words, str(tmp_path / "file" / "there")]) == 2
    assert f"{tmp_path}/file" in capsys.readouterr().err


def test_no_service_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--endpoint", "127.0.0.1:1", "--rate", "1", *SHORT]) == 3
    assert "connection refused" in capsys.readouterr().err


class Times:
    """A dataset that has times, and no prompts."""

    def __init__(self, at_s: tuple[float, ...] | None) -> None:
        self.at_s = at_s
        self.description = "times"

    def requests(self, count: int) -> list[int]:
        return list(range(count))

    def in_order(self, count: int) -> list[int]:
        return list(range(count))


@pytest.mark.parametrize(
    ("words", "process", "count"),
    [
        (["--rate", "2"], Poisson(2.0), 200),
        (["--rate", "2", "--arrivals", "gamma", "--arrivals-cv", "3"], Gamma(2.0, 3.0), 200),
        (["--rate", "2", "--arrivals", "bursty", "--burst", "5,1,4"], Bursty(2.0, 5.0, 1.0, 4.0), 200),
        (["--rate", "2", "--arrivals", "even", "--duration", "10", "--warm-up", "5"], Even(2.0), 29),
        (["--concurrency", "4", "--requests", "7"], Closed(4), 7),
        (["--arrivals", "replay"], Replay((0.0, 1.0, 4.0), "times of the dataset"), 3),
        (["--arrivals", "replay", "--requests", "2"], Replay((0.0, 1.0, 4.0), "times of the dataset"), 2),
    ],
)
def test_flags_make_the_traffic(words: list[str], process: Any, count: int) -> None:
    made = traffic(arguments(*words), Times((0.0, 1.0, 4.0)))  # type: ignore[arg-type]
    assert made.arrivals == process
    assert len(made.requests) == count


def test_a_closed_loop_with_a_duration_has_requests_for_it() -> None:
    made = traffic(arguments("--concurrency", "4", "--duration", "10"), Times(None))  # type: ignore[arg-type]
    assert made.end_s == 10.0
    assert len(made.requests) >= 100


def test_a_burst_is_three_numbers() -> None:
    with pytest.raises(BenchError, match="three numbers"):
        traffic(arguments("--rate", "1", "--arrivals", "bursty", "--burst", "1,2"), Times(None))  # type: ignore[arg-type]


def test_slo_is_in_milliseconds() -> None:
    assert parse_slo("ttft=500, tpot=50") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert parse_slo(None) is ANSWERED


def test_options_are_json_or_text() -> None:
    assert parse_options(["priority=batch", "deadline=1.5", 'stop=["a"]', "x=a=b"]) == {
        "priority": "batch",
        "deadline": 1.5,
        "stop": ["a"],
        "x": "a=b",
    }


def test_late_sends_and_closed_loops_are_remarked_on() -> None:
    late = [request(number, float(number), sent_s=number + 0.5) for number in range(5)]
    one = run(*late)
    one = replace(
        one,
        traffic=replace(one.traffic, offered_rate_per_s=None, concurrency=3),
    )
    told = as_text(one, ANSWERED)
    assert "the generator was short of CPU" in told
    assert "A closed loop asks a slow target less" in told


def test_compare_sets_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = run(*(request(number, number / 10) for number in range(20)), name="fast")
    slow = run(
        *(
            request(
                n, n / 10, chunk_times_s=(n / 10 + 0.8, n / 10 + 1.6), ended_s=n / 10 + 2, output_tokens=2
            )
            for n in range(20)
        ),
        name="slow",
        traffic=TrafficRecord(dataset="by hand", arrivals="by hand", seed=2, offered_rate_per_s=1.0),
    )
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for one, path in zip((fast, slow), paths, strict=True):
        files.write(one, ANSWERED, path)
    assert main(["bench", "compare", *map(str, paths)]) == 0
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("time to first token, P50")]
    assert line.split()[-3:] == ["400", "800", "2.000"]
    assert "slow had another seed: 2 instead of 1" in told
    assert "P99" not in told


def test_compare_names_however_many_runs() -> None:
    told = compared([run(request(0, 0.0))] * 30, ANSWERED)
    for name in ("A (octavo)", "J (octavo)", "K (octavo)", "Z (octavo)", "AA (octavo)", "AD (octavo)"):
        assert name in told


def test_compare_says_what_else_was_asked() -> None:
    def asked(model: str, warm_up_s: float, options: dict[str, Any], **more: Any) -> RunRecord:
        one = run(request(0, 5.0), request(1, 6.0), warm_up_s=warm_up_s, **more)
        return replace(one, target=replace(one.target, model=model, details={"options": options}))

    first = asked("demo", 0.0, {"temperature": 0.0, "ignore_eos": True}, name="first")
    assert differences([first, first]) == []
    other = asked("big", 2.0, {"ignore_eos": False, "priority": "batch"}, name="other")
    assert differences([first, other]) == [
        "other had another model: big instead of demo",
        "other had another warm-up: 2 s instead of 0 s",
        "other had another ignore_eos: False instead of True",
        "other had another priority: batch instead of None",
    ]
    longer = replace(first, name="longer", until_s=60.0)
    assert differences([first, longer]) == []
    longer = replace(longer, requests=(*longer.requests, request(2, 50.0)))
    assert differences([first, longer]) == [
        "longer had another length: 60.0 s with 3 requests instead of 10.0 s with 2 requests"
    ]


def test_compare_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    for words, problem in (
        ([str(tmp_path / "a.json")], "two runs"),
        ([str(tmp_path / "a.json")] * 2, "is not a run"),
        ([str(tmp_path / "b.json")] * 2, "No such file"),
    ):
        with pytest.raises(BenchError, match=problem):
            compare.run(parser.parse_args(words))
