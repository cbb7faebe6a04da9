from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worker_svc.runner.vllm import placement


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of Python without Intel's OpenMP, on a system without tcmalloc."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(placement, "_LIBRARY_FOLDERS", ())
    return tmp_path


def test_environment_threads_share_the_cores_among_ranks(prefix: Path) -> None:
    assert placement.environment({}, cores=8, ranks=3, num_threads=None)["OMP_NUM_THREADS"] == "2"
    assert placement.environment({}, cores=2, ranks=3, num_threads=None)["OMP_NUM_THREADS"] == "1"
    assert placement.environment({}, cores=8, ranks=1, num_threads=5)["OMP_NUM_THREADS"] == "5"


def test_environment_without_intels_openmp_threads_do_not_spin(prefix: Path) -> None:
    added = placement.environment({}, cores=2, ranks=1, num_threads=None)

    assert added["OMP_WAIT_POLICY"] == "passive"
    assert "LD_PRELOAD" not in added


def test_environment_with_intels_openmp_preloads_it_before_what_is_preloaded(prefix: Path) -> None:
    library = prefix / "lib" / "libiomp5.so"
    library.touch()

    added = placement.environment({"LD_PRELOAD": "other.so"}, cores=2, ranks=1, num_threads=None)

    assert added["LD_PRELOAD"] == f"{library}:other.so"
    assert added["KMP_BLOCKTIME"] == "1"


def test_environment_what_the_user_set_stays(prefix: Path) -> None:
    given = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "VLLM_CPU_OMP_THREADS_BIND": "0-3"}

    assert placement.environment(given, cores=2, ranks=1, num_threads=None) == {}
