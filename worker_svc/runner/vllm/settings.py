"""What the runner is started with, as arguments of vLLM's engine under vLLM's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from worker_svc.config import NO_PIPELINE
from worker_svc.errors import InvalidSettings

DEFAULT_BLOCK_SIZE: Final = 32
CPU_BLOCK_MULTIPLE: Final = 32
CPU_MEMORY_UTILIZATION: Final = 0.25

_OURS: Final = "the worker has a setting of its own for it"
_NO_SCHEDULER: Final = "vLLM's scheduler is not used"
REFUSED_ARGS: Final[Mapping[str, str]] = {
    name: reason
    for reason, names in {
        _OURS: (
            "model",
            "tokenizer",
            "dtype",
            "kv_cache_dtype",
            "quantization",
            "enforce_eager",
            "tensor_parallel_size",
            "trust_remote_code",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
        ),
        _NO_SCHEDULER: (
            "scheduler_cls",
            "scheduling_policy",
            "async_scheduling",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "disable_hybrid_kv_cache_manager",
            "kv_transfer_config",
            "kv_events_config",
            "speculative_config",
            "data_parallel_size",
        ),
        "it is what the runner itself relies on": (
            "runner",
            "worker_cls",
            "worker_extension_cls",
            "logprobs_mode",
        ),
    }.items()
    for name in names
}


def chosen_dtype(dtype: str, *, dequantized: bool) -> str:
    """Return the type of the weights that `auto` stands for on this machine.

    On a GPU it is the model's own, which vLLM finds out, unless the weights are `dequantized` and have none.
    vLLM takes bfloat16 on every CPU; one that cannot multiply it natively is several times faster in float32.
    """
    import torch  # noqa: PLC0415 - settings alone do not need it

    if dtype != "auto":
        return dtype
    if torch.cuda.is_available():
        if not dequantized:
            return "auto"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - there is no public question
    return "bfloat16" if native else "float32"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of the runner. `model` is a folder of Hugging Face's layout."""

    model: Path
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    gpu_memory_utilization: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments, and `lora_modules`: paths of adapters by name, as `vllm serve` calls them."""

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of LoRA adapters by name."""
        modules = self.args.get("lora_modules", {})
        if not isinstance(modules, Mapping) or not all(
            isinstance(name, str) and isinstance(path, str) for name, path in modules.items()
        ):
            raise InvalidSettings(f"lora_modules must be an object of names and folders, got {modules!r}")
        for name, path in modules.items():
            if not (Path(path) / "adapter_config.json").is_file():
                raise InvalidSettings(f"lora_modules: {name}: no adapter_config.json in {path}")
        return dict(modules)


def engine_args(settings: VllmSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs.

    Raises:
        InvalidSettings: an argument is not for the user to set, or the worker cannot do what it asks for.
    """
    for name in settings.args:
        if (reason := REFUSED_ARGS.get(name)) is not None:
            raise InvalidSettings(f"vllm argument {name} cannot be set: {reason}")
    if settings.args.get("pipeline_parallel_size", 1) != 1:
        raise InvalidSettings(NO_PIPELINE)
    if on_cpu and settings.block_size % CPU_BLOCK_MULTIPLE:
        raise InvalidSettings(
            f"vLLM on a CPU wants a block_size that is a multiple of {CPU_BLOCK_MULTIPLE}, got "
            f"{settings.block_size}"
        )
    adapters = settings.adapters
    args: dict[str, Any] = {
        "model": str(settings.model),
        "tokenizer": str(settings.model),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": settings.quantization,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "trust_remote_code": settings.trust_remote_code,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": settings.block_size,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if settings.max_model_len is not None:
        args["max_model_len"] = settings.max_model_len
    if settings.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = settings.gpu_memory_utilization
    elif on_cpu:
        args["gpu_memory_utilization"] = CPU_MEMORY_UTILIZATION
    if adapters:
        # vLLM's CPU kernels give rows without an adapter the last slot: an empty one makes that right.
        slots = len(adapters) + 1 if on_cpu else len(adapters)
        args |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots}
    return args | {name: value for name, value in settings.args.items() if name != "lora_modules"}
