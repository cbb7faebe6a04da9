"""All contact with vLLM's internals, which are those of `installed.SUPPORTED_VERSION`.

Import it only after `installed.prepare()`. Block ids here are vLLM's: block 0 is its null block, so the
pool's block b is vLLM's b + 1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_kv_cache_groups,
)
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from worker_svc.errors import DeviceLost, InvalidSettings, ModelLoadError, StepFailed, StepOutOfMemory
from worker_svc.grammar.backend import Mask
from worker_svc.runner.vllm.readings import Reading, Readings, read
from worker_svc.runner.vllm.tier import Tier

NULL_BLOCKS: Final = 1
_EXTENSION: Final = f"{__name__}.StepExtension"
_CPU_SEED_MASK: Final = 2**31 - 1
"""Seeds as vLLM draws them for its noise on a CPU."""
_NO_TOKEN: Final = -1
_DEVICE_ERRORS: Final = ("cuda error", "hip error", "device-side assert", "connection closed by peer", "nccl")
_MEMORY_ERRORS: Final = ("out of memory", "can't allocate memory")


@dataclass(slots=True)
class StartedRow:
    """A sequence that vLLM hears of for the first time, at any point of its life."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: VllmSamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    lora: LoRARequest | None = None


@dataclass(slots=True)
class RunningRows:
    """Rows that vLLM knows, as parallel lists."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int]] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepInput:
    """One step: what to forget, what is new, what runs on, and how far each row goes."""

    finished: set[str]
    started: list[StartedRow]
    running: RunningRows
    num_scheduled_tokens: dict[str, int]
    draw_seeds: dict[str, int]
    """Seeds of the rows that draw their next token at random in this step."""
    wanted: dict[str, Reading]
    """What else is wanted of rows."""


@dataclass(frozen=True, slots=True)
class StepFault:
    """What went wrong in a rank, in words that can travel."""

    kind: str
    message: str


class StepExtension:
    """Methods that vLLM mixes into the worker of each rank; called by name through `collective_rpc`."""

    def octavo_step(
        self,
        scheduler_output: SchedulerOutput,
        resumed: Seq[CachedRequestState],
        draw_seeds: Mapping[str, int],
        wanted: Mapping[str, Reading],
    ) -> tuple[ModelRunnerOutput, Readings] | StepFault | None:
        """Compute one step and sample; the driver returns its output, other ranks nothing."""
        fault = self.octavo_forward(scheduler_output, resumed)
        return self.octavo_sample(draw_seeds, wanted, {}) if fault is None else fault

    def octavo_forward(
        self, scheduler_output: SchedulerOutput, resumed: Seq[CachedRequestState]
    ) -> StepFault | None:
        """Compute one step up to its logits; `octavo_sample` must follow."""
        runner = self.model_runner  # type: ignore[attr-defined]  # the worker that this is mixed into
        try:
            for state in resumed:
                runner.requests[state.req_id] = state
                if runner.uses_mrope:
                    runner._init_mrope_positions(state)  # noqa: SLF001 - what the runner does for new requests
            # What there is when nothing is sampled: no request had its last prompt token in the step.
            self._octavo_output = self.execute_model(scheduler_output)  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - every rank must answer, or the others' answers go astray
            return self._octavo_failed(error)
        return None

    def octavo_sample(
        self,
        draw_seeds: Mapping[str, int],
        wanted: Mapping[str, Reading],
        masks: Mapping[str, Mask],
    ) -> tuple[ModelRunnerOutput, Readings] | StepFault | None:
        """Sample what was computed; the driver returns the step's output, other ranks nothing."""
        runner = self.model_runner  # type: ignore[attr-defined]
        output, self._octavo_output = self._octavo_output, None
        readings = Readings()
        try:
            if output is None:
                if wanted:
                    readings = read(runner, wanted, runner.model_config.get_vocab_size(), masks)
                with _seeded(runner, draw_seeds), _checked(runner):
                    output = self.sample_tokens(_grammar_output(masks))  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - see octavo_forward
            return self._octavo_failed(error)
        return (output, readings) if self.rank == 0 else None  # type: ignore[attr-defined]

    def _octavo_failed(self, error: Exception) -> StepFault:
        self.model_runner.execute_model_state = None  # type: ignore[attr-defined]
        return StepFault(_kind_of(error), f"{type(error).__name__}: {error}"[:2000])

    def octavo_allocate_host(self, num_host_blocks: int) -> None:
        """Make the host tier's memory. Raises MemoryError when there is not enough."""
        self._octavo_tier = Tier(
            self.model_runner.kv_caches,  # type: ignore[attr-defined]
            self.model_runner.kv_cache_config.num_blocks,  # type: ignore[attr-defined]
            num_host_blocks,
        )

    def octavo_copy_out(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy blocks to the host, given as (device block, host block)."""
        self._octavo_tier.copy_out(pairs)

    def octavo_copy_in(self, pairs: Seq[tuple[int, int]], number: int) -> None:
        """Start to copy blocks to the device, given as (device block, host block)."""
        self._octavo_tier.copy_in(pairs, number)

    def octavo_copy_took_s(self, number: int) -> float | None:
        """Return once how long a copy to the device took, when it has arrived."""
        return self._octavo_tier.took_s(number)

    def octavo_memory(self) -> tuple[int, int]:
        """Return the bytes that vLLM was granted and those that KV blocks may take of them."""
        granted = getattr(self, "requested_cpu_memory", None)
        return int(granted if granted is not None else self.requested_memory), int(  # type: ignore[attr-defined]
            self.determine_available_memory()  # type: ignore[attr-defined]
        )


@contextlib.contextmanager
def _seeded(runner: Any, draw_seeds: Mapping[str, int]) -> Iterator[None]:
    """Seed the rows that draw, for the length of one sampling.

    vLLM would keep a generator per request from its first step on; but a generator's state does not survive
    a resume, and one on a partly prefilled row is rewound, which the CPU's cannot be.
    """
    batch = runner.input_batch
    if not draw_seeds:
        yield
    elif runner.device.type == "cpu":
        # vLLM would draw one seed per row from its generator; making that takes longer than the noise.
        seeds = [0] * batch.num_reqs
        for req_id, seed in draw_seeds.items():
            seeds[batch.req_id_to_index[req_id]] = seed & _CPU_SEED_MASK
        sampler = runner.sampler.topk_topp_sampler
        forward = sampler.forward
        sampler.forward = functools.partial(_draw_on_cpu, torch.tensor(seeds))
        try:
            yield
        finally:
            sampler.forward = forward
    else:
        for req_id, seed in draw_seeds.items():
            generator = torch.Generator(device=runner.device)
            generator.manual_seed(seed)
            batch.generators[batch.req_id_to_index[req_id]] = generator
        try:
            yield
        finally:
            batch.generators.clear()


@contextlib.contextmanager
def _checked(runner: Any) -> Iterator[None]:
    """Put what is no token where logits are not finite, for the length of one sampling.

    It goes to the host with the tokens, so nothing more has to be waited for.
    """
    sampler = runner.sampler
    forward = sampler.forward

    def checked(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bad = logits.amax(dim=-1).isfinite().logical_not_()
        output = forward(logits, *args, **kwargs)
        output.sampled_token_ids.masked_fill_(bad.unsqueeze(-1), _NO_TOKEN)
        return output

    sampler.forward = checked
    try:
        yield
    finally:
        sampler.forward = forward


def _draw_on_cpu(
    seeds: torch.Tensor,
    logits: torch.Tensor,
    generators: object,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Stand in for `TopKTopPSampler.forward_cpu`, with the seeds given."""
    del generators
    kept = apply_top_k_top_p(logits, k, p).to(torch.float32)
    return torch.ops._C.fused_gumbel_argmax(kept, seeds), None  # noqa: SLF001 - vLLM's own operators


def _kind_of(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(t in text for t in _MEMORY_ERRORS):
        return StepOutOfMemory.reason
    if any(t in text for t in _DEVICE_ERRORS):
        return DeviceLost.reason
    return StepFailed.reason


@contextlib.contextmanager
def _out_of_memory_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Raise `kind` when a rank runs out of memory, which by itself looks like a rank that is gone."""
    try:
        yield
    except Exception as error:
        if _kind_of(error) != StepOutOfMemory.reason:
            raise
        raise kind(f"{what}: out of memory: {error}") from error


class VllmEngine:
    """A loaded model behind one of vLLM's executors."""

    def __init__(self, args: Mapping[str, Any], adapters: Mapping[str, str]) -> None:
        """Load the model into every rank and measure its memory.

        Raises:
            InvalidSettings: vLLM refuses the settings, or they need what this runner does not do.
            ModelLoadError: the model cannot be loaded.
        """
        self._config = _config(args)
        self._executor = _start(self._config)
        try:
            self._specs = self._kv_specs()
            with _out_of_memory_as(ModelLoadError, f"{self._config.model_config.model}: its largest step"):
                memory: list[tuple[int, int]] = self._rpc("octavo_memory")
            self._granted_bytes, self._available_bytes = min(memory, key=lambda pair: pair[1])
            self.loras = self._load_adapters(adapters)
        except BaseException:
            self._executor.shutdown()
            raise

    @property
    def hf_config(self) -> Any:
        """The model's configuration as transformers reads it."""
        return self._config.model_config.hf_text_config

    @property
    def vocab_size(self) -> int:
        """Size of the logits."""
        return int(self._config.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that a sequence may have."""
        return int(self._config.model_config.max_model_len)

    @property
    def dtype(self) -> str:
        """Type of the weights."""
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> str:
        """Type of keys and values."""
        cache_dtype = self._config.cache_config.cache_dtype
        return self.dtype if cache_dtype == "auto" else str(cache_dtype)

    @property
    def device(self) -> str:
        """`cpu`, `cuda`, ..."""
        return str(current_platform.device_type)

    @property
    def num_ranks(self) -> int:
        """Ranks on this host; those that Ray may have put elsewhere count as if they were here."""
        return int(self._config.parallel_config.local_world_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in one rank."""
        per_block = sum(spec.page_size_bytes for spec in self._specs[0].values())
        return int(per_block) // int(self._config.cache_config.block_size)

    def available_kv_bytes(self, utilization: float) -> int:
        """Return what KV blocks may take in each rank, the null block already left out."""
        share = self._config.cache_config.gpu_memory_utilization
        total = self._granted_bytes / share
        available = int(self._available_bytes + (utilization - share) * total)
        return available - NULL_BLOCKS * self.kv_bytes_per_token * int(self._config.cache_config.block_size)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Make the KV memory of every rank; `num_blocks` without the null block.

        Raises:
            MemoryError: it does not fit, or what runs over it does not fit beside it.
        """
        with _out_of_memory_as(MemoryError, "vLLM's ranks"):
            self._allocate(num_blocks, num_host_blocks)

    def step(
        self, step: StepInput, masks: Callable[[], Mapping[str, Mask]] | None = None
    ) -> tuple[ModelRunnerOutput, Readings]:
        """Compute one step; `masks` is called for what its grammars allow when that is wanted.

        Raises:
            StepOutOfMemory, StepFailed: every rank failed in the same way; nothing that the step started or
                advanced may be relied on.
            DeviceLost: a rank is gone, or the ranks disagree on what happened.
        """
        forward = _message(step)
        if masks is None:
            found = self._answer("octavo_step", *forward, step.draw_seeds, step.wanted)
        else:
            self._answer("octavo_forward", *forward)
            found = self._answer("octavo_sample", step.draw_seeds, step.wanted, masks())
        output: tuple[ModelRunnerOutput, Readings] = found
        return output

    def _answer(self, method: str, *args: Any) -> Any:
        """Return what the driver says to a part of a step; raises as `step` does."""
        outputs = self._rpc(method, *args, timeout_s=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        faults = [output for output in outputs if isinstance(output, StepFault)]
        if not faults:
            return outputs[0]
        fault = faults[0]
        if fault.kind == DeviceLost.reason or len(faults) < len(outputs):
            raise DeviceLost(fault.message)
        raise (StepOutOfMemory if fault.kind == StepOutOfMemory.reason else StepFailed)(fault.message)

    def copy_out(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy blocks to the host in every rank, given as (device block, host block)."""
        self._rpc("octavo_copy_out", pairs)

    def copy_in(self, pairs: Seq[tuple[int, int]], number: int) -> None:
        """Start to copy blocks to the device in every rank; `copy_took_s` knows the copy by its number."""
        self._rpc("octavo_copy_in", pairs, number)

    def copy_took_s(self, number: int) -> list[float | None]:
        """Return what each rank has to tell of a copy to the device: how long it took, once it is done."""
        return self._rpc("octavo_copy_took_s", number)

    def close(self) -> None:
        """End the ranks."""
        self._executor.shutdown()

    def _allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        config = self._config
        block_size = int(config.cache_config.block_size)
        config.cache_config.num_gpu_blocks_override = num_blocks + NULL_BLOCKS
        if num_blocks * block_size < self.max_model_len:
            config.model_config.max_model_len = num_blocks * block_size
            self._rpc("update_max_model_len", num_blocks * block_size)
        kv_configs = get_kv_cache_configs(config, self._specs, [self._available_bytes] * len(self._specs))
        for kv_config in kv_configs:
            kv_config.kv_cache_layout = config.cache_config.kv_cache_layout
        config.cache_config.num_gpu_blocks = generate_scheduler_kv_cache_config(kv_configs).num_blocks
        self._executor.initialize_from_config(kv_configs)
        self._executor.compile_or_warm_up_model()
        if num_host_blocks:
            self._rpc("octavo_allocate_host", num_host_blocks)

    def _rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        try:
            return list(self._executor.collective_rpc(method, timeout=timeout_s, args=args))
        except (RuntimeError, TimeoutError, OSError) as error:
            # Ranks answer for their own faults; what is raised here is a rank that did not answer.
            raise DeviceLost(f"a rank of the model is gone: {error}") from error

    def _kv_specs(self) -> list[Any]:
        config = self._config
        register_all_kvcache_specs(config)
        specs = self._executor.get_kv_cache_specs()
        _check_one_group(config, specs)
        layout = resolve_kv_cache_layout(
            config,
            self._executor.get_supported_kv_cache_layouts(),
            [spec for of_rank in specs for spec in of_rank.values()],
        )
        self._executor.set_kv_cache_layout(layout.name)
        return list(specs)

    def _load_adapters(self, adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
        loras = {}
        for number, (name, path) in enumerate(adapters.items(), start=1):
            loras[name] = LoRARequest(name, number, path)
            try:
                self._executor.add_lora(loras[name])
            except Exception as error:
                raise ModelLoadError(f"adapter {name} in {path}: {error}") from error
        return loras


def platform_is_cpu() -> bool:
    """Return whether this build of vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


def gpu_properties() -> tuple[str, int] | None:
    """Return name and bytes of memory of a GPU, or None on a CPU."""
    if platform_is_cpu():
        return None
    return current_platform.get_device_name(), current_platform.get_device_total_memory()


def make_sampling(kwargs: Mapping[str, Any]) -> VllmSamplingParams:
    """Return vLLM's sampling parameters. Raises ValueError for values that it does not take."""
    banned = kwargs["bad_words_token_ids"]
    sampling = VllmSamplingParams(**{k: v for k, v in kwargs.items() if k != "bad_words_token_ids"})
    sampling._bad_words_token_ids = banned  # noqa: SLF001 - where it keeps words as tokens
    return sampling


def _config(args: Mapping[str, Any]) -> VllmConfig:
    backend = args.get("distributed_executor_backend")
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise InvalidSettings("distributed_executor_backend ray: Ray is not installed (`pip install ray`)")
    if backend is None:
        backend = "mp" if args.get("tensor_parallel_size", 1) > 1 else "uni"
    try:
        config = EngineArgs(
            **{**args, "distributed_executor_backend": backend, "worker_extension_cls": _EXTENSION}
        ).create_engine_config()
    except TypeError as error:
        raise InvalidSettings(f"vLLM: {error}".replace("EngineArgs.__init__() got an ", "")) from None
    except (ValueError, NotImplementedError) as error:
        raise InvalidSettings(f"vLLM refuses the settings: {error}") from error
    if config.use_v2_model_runner:
        raise InvalidSettings(
            "vLLM chose its second model runner, this one drives the first: drop what needs it"
        )
    model = config.model_config
    if model.runner_type != "generate" or model.is_encoder_decoder:
        raise InvalidSettings(f"{model.architecture} is not a decoder that generates text")
    return config


def _start(config: VllmConfig) -> Executor:
    executor = Executor.get_class(config)
    set_num_threads = torch.set_num_threads
    try:
        return executor(config)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelLoadError(f"{config.model_config.model}: out of memory while loading: {error}") from error
    except Exception as error:
        raise ModelLoadError(f"{config.model_config.model}: {error}") from error
    finally:
        # vLLM puts a warning in its place, for the whole process.
        torch.set_num_threads = set_num_threads


def _check_one_group(config: VllmConfig, specs: Seq[Mapping[str, Any]]) -> None:
    """Refuse models whose layers cannot share one block table."""
    name = config.model_config.architecture
    kinds = {type(spec).__name__ for spec in specs[0].values()}
    try:
        groups = get_kv_cache_groups(config, dict(specs[0]))
    except (ValueError, NotImplementedError) as error:
        raise InvalidSettings(f"{name} needs {', '.join(sorted(kinds))}: {error}") from error
    count = len(groups)
    if count != 1:
        raise InvalidSettings(
            f"{name} needs {count} KV cache groups ({', '.join(sorted(kinds)) or 'none'}); a sequence has "
            "one block table here, so only models whose layers all share one group are served"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, AttentionSpec | UniformTypeKVCacheSpecs):
        raise InvalidSettings(f"{name} keeps {type(spec).__name__} state, Octavo serves attention only")
    if spec.block_size != config.cache_config.block_size:
        raise InvalidSettings(
            f"vLLM chose blocks of {spec.block_size} tokens for {name}: set block_size to {spec.block_size}"
        )


def _grammar_output(masks: Mapping[str, Mask]) -> GrammarOutput | None:
    """Return masks by request in vLLM's terms."""
    return GrammarOutput(list(masks), np.stack(list(masks.values()))) if masks else None


def _message(step: StepInput) -> tuple[SchedulerOutput, list[CachedRequestState]]:
    """Return the arguments of `StepExtension.octavo_forward`."""
    new: list[NewRequestData] = []
    resumed: list[CachedRequestState] = []
    running = step.running
    for row in step.started:
        if not row.output_token_ids:
            new.append(
                NewRequestData(
                    req_id=row.req_id,
                    prompt_token_ids=row.prompt_token_ids,
                    mm_features=[],
                    sampling_params=row.sampling,
                    pooling_params=None,
                    block_ids=(row.block_ids,),
                    num_computed_tokens=row.num_computed_tokens,
                    lora_request=row.lora,
                )
            )
            continue
        # New requests have no output in vLLM's eyes; one that has is resumed, from a state of our making.
        resumed.append(
            CachedRequestState(
                req_id=row.req_id,
                prompt_token_ids=row.prompt_token_ids,
                mm_features=[],
                sampling_params=row.sampling,
                generator=None,
                block_ids=([],),
                num_computed_tokens=row.num_computed_tokens,
                output_token_ids=row.output_token_ids,
                lora_request=row.lora,
            )
        )
        running.req_ids.append(row.req_id)
        running.new_block_ids.append((row.block_ids,))
        running.num_computed_tokens.append(row.num_computed_tokens)
        running.num_output_tokens.append(len(row.output_token_ids))
    scheduler_output = SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=running.req_ids,
            resumed_req_ids={state.req_id for state in resumed},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=running.new_block_ids,
            num_computed_tokens=running.num_computed_tokens,
            num_output_tokens=running.num_output_tokens,
        ),
        num_scheduled_tokens=step.num_scheduled_tokens,
        total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=step.finished,
        free_encoder_mm_hashes=[],
    )
    return scheduler_output, resumed
