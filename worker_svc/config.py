"""Settings of the worker: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from octavo.service.settings import ServiceSettings
from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

_RUNNERS_OF: Final = {
    "device": ("torch",),
    "padded": ("torch", "sim"),
    **dict.fromkeys(("dtype", "num_threads"), ("torch", "vllm")),
    **dict.fromkeys(
        (
            "kv_cache_dtype",
            "quantization",
            "enforce_eager",
            "tensor_parallel_size",
            "trust_remote_code",
            "vllm_args",
        ),
        ("vllm",),
    ),
    **dict.fromkeys(("sim_profile", "sim_speed"), ("sim",)),
}
"""Settings that not every runner knows: elsewhere they would be ignored, and nobody would notice."""

NO_PIPELINE: Final = (
    "pipeline_parallel_size must be 1: a step's tokens are known before the next step starts, so "
    "stages would wait for each other; use tensor_parallel_size, or more workers"
)

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=128)]


class WorkerSettings(ServiceSettings):
    """Everything that can be set of a worker."""

    table: ClassVar[str] = "worker"

    model_config = SettingsConfigDict(
        env_prefix="OCTAVO_WORKER_",
        extra="forbid",
        frozen=True,
    )

    config_file: Path | None = Field(None, description="TOML file with a table [worker]")

    # What to run
    model: Name = Field(
        "demo",
        description="model folder, GGUF file, name on the Hugging Face hub, `demo`, or `sim` (sim runner)",
    )
    revision: Name | None = Field(None, description="branch, tag or commit of a model on the hub")
    runner: Literal["torch", "vllm", "sim"] = Field("torch", description="backend that computes the steps")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the torch runner computes")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of the weights"
    )
    kv_cache_dtype: str = Field("auto", description="type of keys and values in the cache")
    quantization: str | None = Field(None, description="quantization of the weights (vllm)")
    enforce_eager: bool = Field(False, description="no CUDA graphs (vllm)")
    tensor_parallel_size: Count = Field(1, description="GPUs that share the model (vllm)")
    pipeline_parallel_size: Count = Field(
        1, description="always 1: stages would wait for each other; see tensor_parallel_size, or add workers"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with the model (vllm)")
    num_threads: Count | None = Field(None, description="threads of the runner; by default one per core")
    vllm_args: dict[str, Any] = Field({}, description="further engine arguments of vLLM")

    # How much at once
    max_num_seqs: Count = Field(32, description="sequences that run at the same time, at most")
    max_num_batched_tokens: Count = Field(512, description="tokens computed in one step, at most")
    max_model_len: Count | None = Field(
        None,
        description="tokens of one sequence, at most; by default what model and pool can hold",
    )

    # KV memory
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

    padded: bool = Field(
        False, description="compute each batch padded to its longest row, as the static arm does (torch, sim)"
    )

    # Where to be found
    listen: str = Field(
        "127.0.0.1:50061",
        description="address of the gRPC port, as host:port; port 0 is any free one",
    )
    metrics_port: Port | None = Field(
        9465, description="Prometheus metrics on the same host; 0 is any free one, `none` is off"
    )
    worker_id: Name | None = Field(None, description="name of this worker in the fleet; by default host:port")

    # Behaviour
    drain_grace_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="seconds that running sequences get after SIGTERM"
    )
    enable_faults: bool = Field(False, description="allow fault injection")
    check_integrity: bool = Field(
        False, description="check all books after every step, and die if they do not balance"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: json unless on a terminal"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    # The sim runner
    sim_profile: Path | None = Field(
        None,
        description="JSON of measured step times for --runner sim; by default the demo model on two cores",
    )
    sim_speed: Annotated[float, Field(gt=0)] = Field(
        1.0, description="the sim runner's clock, as a multiple of real time"
    )

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or the default of the runner."""
        return self.block_size or (32 if self.runner == "vllm" else 16)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for one, other in (("num_blocks", "kv_cache_bytes"), ("num_host_blocks", "host_kv_bytes")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} say the same thing: set one of them")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) < max_num_seqs "
                f"({self.max_num_seqs}): a step computes at least one token of every running sequence"
            )
        if self.pipeline_parallel_size != 1:
            raise ValueError(NO_PIPELINE)
        for name, runners in _RUNNERS_OF.items():
            if self.runner not in runners and getattr(self, name) != type(self).model_fields[name].default:
                known = " or ".join(runners)
                raise ValueError(f"{name} is for the {known} runner, and the runner is {self.runner}")
        return self

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return None if value == "none" else value

    @field_validator("vllm_args", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value
