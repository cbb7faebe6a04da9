"""How many sequences and tokens a step may hold, where the settings leave that to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from worker_svc.config import BatchSection, WorkerSettings
from worker_svc.engine.limits import Limit, Limits

GIB: Final = 2**30
CPU_SEQS: Final = 32
CPU_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is to be known of a GPU."""

    name: str
    memory_bytes: int


def choose(batch: BatchSection, gpu: Gpu | None) -> Limits:
    """Return the limits: what is set, and for the rest what fits the GPU, or the CPU where there is none.

    On a GPU they are those of `vllm serve` (`EngineArgs.get_batch_defaults` of vLLM 0.32, usage context
    OPENAI_API_SERVER): 1024 sequences and 16384 tokens from 160 GiB; 1024 and 8192 from 70 GiB, but not on an
    A100, which loses throughput by it (vLLM's PR 17885); else 256 and 2048. On a CPU they are 32 and 512: a
    step of vLLM's 128 and 2048 would keep two cores busy for seconds.
    """
    seqs, tokens = _fitting(gpu)
    if batch.max_num_seqs is not None:
        seqs = Limit(batch.max_num_seqs)
    if batch.max_num_batched_tokens is not None:
        tokens = Limit(batch.max_num_batched_tokens)
        seqs = seqs.at_most(tokens.value, "as many as tokens")
    elif tokens.value < seqs.value:
        tokens = Limit(seqs.value, "as many as sequences", chosen=True)
    return Limits(seqs, tokens)


def _fitting(gpu: Gpu | None) -> tuple[Limit, Limit]:
    if gpu is None:
        seqs, tokens, reason = CPU_SEQS, CPU_TOKENS, "chosen for a CPU"
    else:
        reason = f"chosen for {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB"
        if gpu.memory_bytes >= 160 * GIB:
            seqs, tokens = 1024, 16384
        elif gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.lower():
            seqs, tokens = 1024, 8192
        else:
            seqs, tokens = 256, 2048
    return Limit(seqs, reason, chosen=True), Limit(tokens, reason, chosen=True)


def limits_of(settings: WorkerSettings) -> Limits:
    """Return the limits on this machine, before it is known what the KV pool holds.

    Raises:
        ModelLoadError: there is no such device.
        InvalidSettings: the runner is not installed.
    """
    return choose(settings.batch, _gpu(settings))


# ruff: noqa: PLC0415 - what runners need takes seconds to import, and need not be installed


def _gpu(settings: WorkerSettings) -> Gpu | None:
    match settings.backend.runner:
        case "torch":
            from worker_svc.runner.torch.compute import gpu_properties

            found = gpu_properties(settings.backend.device)
        case "vllm":
            from worker_svc.runner.vllm import installed

            installed.prepare()
            from worker_svc.runner.vllm import internals

            found = internals.gpu_properties()
        case "sim":
            return None
    return Gpu(*found) if found is not None else None
