from __future__ import annotations

import json
from pathlib import Path

import pytest
from octavo.cli.main import main
from octavo_lab import fragmentation
from octavo_lab.fragmentation import PoolTraffic, simulate

SMALL = PoolTraffic(max_tokens=2000, pool_tokens=2**14, num_looks=100, warm_up_looks=20)


def test_paged_memory_holds_more_sequences_than_contiguous() -> None:
    paged = simulate(SMALL, block_size=16, paged=True)
    contiguous = simulate(SMALL, block_size=16, paged=False)
    assert paged.utilization > 0.97
    assert paged.utilization > contiguous.utilization > 0.2
    assert paged.mean_sequences > 1.3 * contiguous.mean_sequences
    assert contiguous.preemptions == 0


def test_smaller_blocks_waste_less() -> None:
    shares = [simulate(SMALL, block_size=size, paged=True).utilization for size in (8, 32, 128)]
    assert shares == sorted(shares, reverse=True)


def test_simulation_repeats_with_its_seed() -> None:
    assert simulate(SMALL, block_size=16, paged=True) == simulate(SMALL, block_size=16, paged=True)


def test_command_prints_a_table_and_draws_the_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(fragmentation, "BLOCK_SIZES", (16, 64))
    monkeypatch.setattr(fragmentation, "PoolTraffic", lambda seed: SMALL)
    plot = tmp_path / "shares.svg"
    assert main(["bench", "fragmentation", "--plot", str(plot)]) == 0
    assert capsys.readouterr().out.count("\n") == 6
    assert plot.read_text().startswith("<?xml")
    assert main(["bench", "fragmentation", "--json"]) == 0
    assert [usage["block_size"] for usage in json.loads(capsys.readouterr().out)] == [16, 16, 64, 64]
