"""The traces that come with octavo-lab, and those of a user's folder."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from octavo_lab import traces
from octavo_lab.traces import TraceNotFoundError, TraceRequest, packed, read_trace, unpacked

FIGURES = {
    # requests; mean, P50 and P99 of the prompts; the same of the output
    "azure-conv": (19366, (1155, 1020, 4142), (211, 129, 601)),
    "azure-code": (8819, (2048, None, 7436), (28, None, 252)),
    "mooncake": (12031, (12035, None, None), (343, None, None)),
}
"""As their README tells them."""
MOST_BYTES = 2**19


def figures(values: list[int]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return statistics.fmean(values), cuts[49], cuts[98]


@pytest.fixture(autouse=True)
def no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(traces.TRACES_VARIABLE, raising=False)


@pytest.mark.parametrize("name", FIGURES)
def test_trace_of_the_package_has_the_figures_of_its_source(name: str) -> None:
    count, *wanted = FIGURES[name]
    requests = read_trace(name)
    found = (
        figures([one.prompt_tokens for one in requests]),
        figures([one.output_tokens for one in requests]),
    )
    assert len(requests) == count
    for ours, theirs in zip(found, wanted, strict=True):
        for value, told in zip(ours, theirs, strict=True):
            assert told is None or value == pytest.approx(told, abs=1)
    times = [one.at for one in requests]
    assert (times[0], times) == (0.0, sorted(times))
    assert 3400 < times[-1] < 3601


def test_mooncake_prefixes_of_the_package_give_the_hit_rate_of_their_source() -> None:
    hits = blocks = 0
    seen: set[int] = set()
    for one in read_trace("mooncake"):
        hits += sum(1 for block in one.prefix if block in seen)
        blocks += len(one.prefix)
        seen.update(one.prefix)
    assert hits / blocks == pytest.approx(0.366, abs=0.0005)


def test_traces_of_the_package_are_small_and_tell_source_and_licence() -> None:
    folder = Path(traces.__file__).parent
    assert sum(file.stat().st_size for file in folder.glob("*.xz")) < MOST_BYTES
    told = (folder / "README.md").read_text()
    assert all(f"{name}.json.xz" in told for name in traces.TRACES)
    assert "CC BY 4.0" in told
    assert "Apache-2.0" in told


def test_packed_requests_are_what_they_were() -> None:
    requests = [
        TraceRequest(0.0, 3, 1, (0, 1, 2, 9)),
        TraceRequest(0.1234567, 5000, 1, (0, 1, 7)),
        TraceRequest(2.5, 1, 8),
    ]
    assert unpacked(packed(requests)) == requests


def test_folder_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "azure_llm_2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    named = read_trace("azure-conv", tmp_path)
    assert named == [TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 1)]
    monkeypatch.setenv(traces.TRACES_VARIABLE, str(tmp_path))
    assert read_trace("azure-conv") == named
    with pytest.raises(TraceNotFoundError, match=r"no mooncake_conversation\.jsonl in .*--traces"):
        read_trace("mooncake")


def test_mooncake_trace_is_read_with_its_hashes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 9]},
    ]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_trace("mooncake", tmp_path) == [
        TraceRequest(0.0, 1100, 5, (0, 1, 2)),
        TraceRequest(2.5, 1030, 1, (0, 1, 9)),
    ]
