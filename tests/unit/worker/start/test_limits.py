"""What a step may hold, by device, settings and pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from octavo.steptimes import StepTimes

from worker_svc.config import WorkerSettings
from worker_svc.engine.limits import Limits
from worker_svc.runner.sim import SimRunner, built_in_model
from worker_svc.runner.vllm import installed
from worker_svc.start.limits import GIB, Gpu, choose, limits_of
from worker_svc.start.load import build

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB)


def chosen(gpu: Gpu | None = None, **flags: Any) -> Limits:
    return choose(WorkerSettings.load(flags).batch, gpu)


@pytest.mark.parametrize(
    ("gpu", "seqs", "tokens"),
    [
        (None, 32, 512),
        (Gpu("NVIDIA B200", 178 * GIB), 1024, 16384),
        (Gpu("NVIDIA H200", 139 * GIB), 1024, 8192),
        (H100, 1024, 8192),
        (Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB), 256, 2048),
        (Gpu("NVIDIA L4", 22 * GIB), 256, 2048),
    ],
)
def test_limits_fit_the_device(gpu: Gpu | None, seqs: int, tokens: int) -> None:
    limits = chosen(gpu)

    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM warns about itself while it is imported
@pytest.mark.parametrize("memory_gib", [16, 80, 180])
def test_limits_on_a_gpu_are_those_of_vllm_serve(monkeypatch: pytest.MonkeyPatch, memory_gib: int) -> None:
    installed.prepare()
    from vllm.engine import arg_utils  # noqa: PLC0415 - only where vLLM is installed
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    name = "NVIDIA Something"
    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory_gib * GIB,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    limits = chosen(Gpu(name, memory_gib * GIB))

    serving = UsageContext.OPENAI_API_SERVER
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs[serving], tokens[serving])


def test_limits_that_are_set_stay_and_what_is_chosen_fits_them() -> None:
    both = chosen(H100, max_num_seqs=4, max_num_batched_tokens=64)
    many_seqs, few_tokens = chosen(max_num_seqs=600), chosen(max_num_batched_tokens=16)

    assert (both.max_num_seqs, both.max_num_batched_tokens) == (4, 64)
    assert (many_seqs.max_num_seqs, many_seqs.max_num_batched_tokens) == (600, 600)
    assert (few_tokens.max_num_seqs, few_tokens.max_num_batched_tokens) == (16, 16)


def test_limits_say_how_they_came_about() -> None:
    assert chosen().reason == "32 sequences and 512 tokens a step (chosen for a CPU)"
    assert chosen(H100, max_num_seqs=64).reason == (
        "64 sequences (set), 8192 tokens a step (chosen for NVIDIA H100 80GB HBM3, 80 GiB)"
    )
    assert chosen(max_num_seqs=600).reason == "600 sequences (set), 600 tokens a step (as many as sequences)"


def test_limits_that_were_chosen_are_within_the_pool_and_those_that_were_set_are_not_touched() -> None:
    assert chosen(H100).within(num_blocks=100, block_size=16).reason == (
        "100 sequences and 1600 tokens a step (all that 100 KV blocks hold)"
    )
    assert chosen(H100).within(num_blocks=10_000, block_size=16) == chosen(H100)
    seats = chosen(H100, max_num_seqs=2000).within(num_blocks=100, block_size=16)
    assert (seats.max_num_seqs, seats.max_num_batched_tokens) == (2000, 2000)


def test_limits_of_a_gpu_under_the_torch_runner_are_chosen_from_its_properties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # noqa: PLC0415 - slow, and only this test needs it

    properties = SimpleNamespace(name=H100.name, total_memory=H100.memory_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    assert limits_of(WorkerSettings.load({})) == chosen(H100)
    assert limits_of(WorkerSettings.load({"device": "cpu"})) == chosen()
    assert limits_of(WorkerSettings.load({"runner": "sim"})) == chosen()


def test_limits_in_force_are_those_of_the_engine_and_of_the_pool() -> None:
    settings = WorkerSettings.load({"runner": "sim", "model": "sim", "num_blocks": 8})
    loaded = build(settings, SimRunner(built_in_model(), StepTimes.builtin()))

    assert (loaded.limits.max_num_seqs, loaded.limits.max_num_batched_tokens) == (8, 128)
