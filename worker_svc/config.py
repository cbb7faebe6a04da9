"""Settings of the worker, in sections: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from octavo.service.settings import (
    COMMAS,
    NONE,
    Amount,
    Count,
    Grace,
    Name,
    Port,
    ProcessSection,
    Seconds,
    Section,
    ServerSection,
    ServiceSettings,
)
from pydantic import Field, field_validator, model_validator

NO_PIPELINE: Final = (
    "pipeline_parallel_size must be 1: a step's tokens are known before the next step starts, so "
    "stages would wait for each other; use tensor_parallel_size, or more workers"
)

Share = Annotated[float, Field(gt=0, le=1)]


class BackendSection(Section):
    """The model, and what computes it."""

    model: Name = Field(
        "demo",
        description="model folder, GGUF file, name on the Hugging Face hub, `demo`, or `sim` (sim runner)",
    )
    revision: Name | None = Field(None, description="branch, tag or commit of a model on the hub")
    served_model_name: Annotated[tuple[Name, ...], COMMAS] = Field(
        (),
        description="names that requests may use, its id first; by default that of its file or folder",
    )
    runner: Literal["torch", "vllm", "sim"] = Field("torch", description="backend that computes the steps")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the torch runner computes")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of the weights"
    )
    num_threads: Count | None = Field(None, description="threads of the runner; by default one per core")
    padded: bool = Field(
        False, description="compute each batch padded to its longest row, as the static arm does (torch, sim)"
    )

    @field_validator("served_model_name", mode="after")
    @classmethod
    def _named_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("names a model twice")
        return names


class VllmSection(Section):
    """What only the vllm runner knows."""

    kv_cache_dtype: str = Field("auto", description="type of keys and values in the cache")
    quantization: str | None = Field(None, description="quantization of the weights (vllm)")
    enforce_eager: bool = Field(False, description="no CUDA graphs (vllm)")
    tensor_parallel_size: Count = Field(1, description="GPUs that share the model (vllm)")
    pipeline_parallel_size: Count = Field(
        1, description="always 1: stages would wait for each other; see tensor_parallel_size, or add workers"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with the model (vllm)")
    vllm_args: dict[str, Any] = Field({}, description="further engine arguments of vLLM")

    @model_validator(mode="after")
    def _one_stage(self) -> Self:
        if self.pipeline_parallel_size != 1:
            raise ValueError(NO_PIPELINE)
        return self

    @field_validator("vllm_args", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value


class SimSection(Section):
    """What only the sim runner knows."""

    sim_profile: Path | None = Field(
        None,
        description="JSON of measured step times for --runner sim; by default the demo model on two cores",
    )
    sim_speed: Annotated[float, Field(gt=0)] = Field(
        1.0, description="the sim runner's clock, as a multiple of real time"
    )


_RUNNERS_OF: Final = {
    "device": ("torch",),
    "padded": ("torch", "sim"),
    **dict.fromkeys(("dtype", "num_threads"), ("torch", "vllm")),
    **dict.fromkeys(VllmSection.model_fields, ("vllm",)),
    **dict.fromkeys(SimSection.model_fields, ("sim",)),
}
"""Settings that not every runner knows: elsewhere they would be ignored, and nobody would notice."""


class BatchSection(Section):
    """How much is computed at once."""

    max_num_seqs: Count | None = Field(
        None, description="sequences that run at the same time, at most; by default chosen for the device"
    )
    max_num_batched_tokens: Count | None = Field(
        None, description="tokens computed in one step, at most; by default chosen for the device"
    )
    max_model_len: Count | None = Field(
        None,
        description="tokens of one sequence, at most; by default what model and pool can hold",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_num_batched_tokens is None or self.max_num_seqs is None:
            return self  # what is chosen fits what is set
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) < max_num_seqs "
                f"({self.max_num_seqs}): a step computes at least one token of every running sequence"
            )
        return self


class KvSection(Section):
    """How much KV memory there is, and how it is divided."""

    block_size: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="tokens per KV block; by default 16, and 32 with the vllm runner"
    )
    num_blocks: Count | None = Field(None, description="KV blocks on the device")
    kv_cache_bytes: Count | None = Field(
        None, description="bytes of KV blocks on the device, instead of num_blocks"
    )
    gpu_memory_utilization: Share | None = Field(
        None,
        description="share of memory for weights, activations and KV blocks; "
        "by default 0.9 of a GPU's, 0.25 of what is available on a CPU",
    )
    num_host_blocks: Amount | None = Field(None, description="KV blocks in the host tier; by default none")
    host_kv_bytes: Amount | None = Field(
        None, description="bytes of the host tier, instead of num_host_blocks"
    )
    pin_budget_blocks: Amount | None = Field(
        None,
        description="KV blocks that pinned prefixes may hold; by default what the longest sequence leaves",
    )
    kv_layout: Literal["paged", "contiguous"] = Field(
        "paged", description="contiguous: one run per sequence, the control arm of experiments"
    )

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        for one, other in (("num_blocks", "kv_cache_bytes"), ("num_host_blocks", "host_kv_bytes")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} say the same thing: set one of them")
        return self


class WorkerServerSection(ServerSection):
    """Where schedulers find it."""

    listen: str = Field(
        "127.0.0.1:50061",
        description="address of the gRPC port, as host:port; port 0 is any free one",
    )
    metrics_port: Annotated[Port | None, NONE] = Field(
        9465, description="Prometheus metrics on the same host; 0 is any free one, `none` is off"
    )
    key_file: Path | None = Field(
        None,
        description="key file of the schedulers: metrics want a key with the role metrics or operator; "
        "followed while it changes",
    )
    worker_secret_file: Path | None = Field(
        None,
        description="file of secrets, one a line: callers present one of them; followed while it changes",
    )
    scheduler_names: Annotated[tuple[Name, ...], COMMAS] = Field(
        ("scheduler",),
        description="with mtls and without a secret, names of which a caller's certificate must bear one",
    )
    worker_id: Name | None = Field(None, description="name of this worker in the fleet; by default host:port")
    preferred_grace_s: Grace = Field(
        1.0,
        description="after the start, and after the stream of a scheduler was lost, those of a higher "
        "rank are kept waiting for so many seconds",
    )
    scheduler_silence_s: Seconds = Field(
        2.0,
        description="a scheduler that stands still for so long loses the worker to one that stands by",
    )

    @model_validator(mode="after")
    def _knows_its_schedulers(self) -> Self:
        if self.is_reachable and self.worker_secret_file is None and not self.mtls and not self.insecure:
            raise ValueError(
                f"listen: whoever reaches {self.listen} could command this worker: set worker_secret_file or "
                "mtls, or insecure where the network is trusted"
            )
        return self


class WorkerProcessSection(ProcessSection):
    """How the process behaves."""

    drain_grace_s: Grace = Field(30.0, description="seconds that running sequences get after SIGTERM")
    step_limit_s: Seconds = Field(
        20.0,
        description="a step that takes longer, and 20 times as long as any of its size, ends the process",
    )
    first_step_limit_s: Seconds = Field(
        120.0, description="the same for the first steps of a size, which may compile"
    )
    enable_faults: bool = Field(False, description="allow fault injection")
    poison_token: Amount | None = Field(
        None,
        description="with enable_faults, from the start on: the process dies where it computes this token",
    )
    check_integrity: bool = Field(
        False, description="check all books after every step, and die if they do not balance"
    )


class WorkerSettings(ServiceSettings):
    """Everything that can be set of a worker."""

    service: ClassVar[str] = "worker"

    backend: BackendSection
    vllm: VllmSection
    sim: SimSection
    batch: BatchSection
    kv: KvSection
    server: WorkerServerSection
    process: WorkerProcessSection

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or the default of the runner."""
        return self.kv.block_size or (32 if self.backend.runner == "vllm" else 16)

    @model_validator(mode="after")
    def _runner_knows(self) -> Self:
        runner = self.backend.runner
        for name, value, field in self.items():
            runners = _RUNNERS_OF.get(name, (runner,))
            if runner not in runners and value != field.default:
                raise ValueError(
                    f"{name} is for the {' or '.join(runners)} runner, and the runner is {runner}"
                )
        return self
