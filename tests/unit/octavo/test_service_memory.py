"""What limits the memory of a service, and when it refuses for it."""

from __future__ import annotations

from pathlib import Path

from octavo.service.memory import MemoryCeiling, limit_bytes, rss_bytes

GIB = 2**30


def test_limit_is_the_least_on_the_way_up(tmp_path: Path) -> None:
    root, membership = tmp_path / "groups", tmp_path / "membership"
    membership.write_text("0::/slice/scope\n")
    assert limit_bytes(root, membership) is None
    (root / "slice" / "scope").mkdir(parents=True)
    (root / "slice" / "scope" / "memory.max").write_text("max\n")
    assert limit_bytes(root, membership) is None
    (root / "slice" / "memory.max").write_text(f"{6 * GIB}\n")
    assert limit_bytes(root, membership) == 6 * GIB


def test_limit_of_the_first_version(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/job\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")

    assert limit_bytes(tmp_path, membership) == 3 * GIB


def test_ceiling_is_reached_while_there_is_as_much_memory_and_is_not_read_at_each_question() -> None:
    now, rss, reads = 0.0, 99, 0

    def read() -> int:
        nonlocal reads
        reads += 1
        return rss

    ceiling = MemoryCeiling(100, read, lambda: now)
    assert not ceiling.is_reached()
    rss = 100
    assert not ceiling.is_reached()
    now = 0.05
    assert ceiling.is_reached()
    rss, now = 99, 0.1
    assert not ceiling.is_reached()
    assert reads == 3


def test_memory_of_this_process_is_that_of_a_process_and_below_its_default_ceiling() -> None:
    assert 5 * 2**20 < rss_bytes() < MemoryCeiling(None).max_rss_bytes
