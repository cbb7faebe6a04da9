"""What limits the memory of a service, and when it refuses for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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


_KEEP = """
import sys
from threading import Event, Thread
from octavo.service.memory import return_what_is_freed, rss_bytes

if sys.argv[1] == "return":
    return_what_is_freed()
MIB, pins, over = 1 << 20, [], Event()

def receive(done):
    pieces = [b"a" * 100_000 for _ in range(160)]
    pins.append(bytes(1000))
    del pieces
    done.set()
    over.wait()

before = rss_bytes()
for _ in range(4):
    message = [b"a" * (16 * MIB) for _ in range(2)]
    pins.append(bytes(1000))
    del message
for _ in range(8):
    Thread(target=receive, args=(done := Event(),)).start()
    done.wait()
print((rss_bytes() - before) / MIB)
over.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize("way", ["keep", "return"])
def test_large_messages_leave_their_memory_to_the_system(way: str) -> None:
    run = subprocess.run((sys.executable, "-c", _KEEP, way), capture_output=True, text=True, check=True)

    kept_mib = float(run.stdout)
    assert (kept_mib < 40) is (way == "return"), f"{kept_mib:.0f} MiB are kept"
