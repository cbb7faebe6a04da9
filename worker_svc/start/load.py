"""From settings to an engine over a loaded model. Runs in the engine's thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import structlog
from octavo.steptimes import StepTimes, StepTimesError

from worker_svc.config import WorkerSettings
from worker_svc.engine.engine import EngineConfig, WorkerEngine
from worker_svc.engine.faults import Fault, FaultKind, Faults, FaultyRunner
from worker_svc.engine.loop import Loaded
from worker_svc.errors import InvalidSettings
from worker_svc.grammar.backend import GrammarError, Vocabulary
from worker_svc.grammar.guide import Grammars
from worker_svc.models.files import ModelFormat, ResolvedModel
from worker_svc.models.progress import Progress
from worker_svc.runner.base import LoadedModel, ModelRunner
from worker_svc.start.limits import limits_of
from worker_svc.start.sizing import size

log = structlog.get_logger(__name__)


def load(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Load the model, size and allocate the KV memory, and build the engine.

    Raises:
        ModelLoadError: the model cannot be loaded.
        InvalidSettings: the settings do not fit the model or the machine.
    """
    return build(settings, load_runner(settings, progress))


def build(settings: WorkerSettings, runner: ModelRunner) -> Loaded:
    """Size and allocate the KV memory of a loaded runner, and build the engine.

    Raises:
        InvalidSettings: the settings do not fit the model or the machine.
    """
    info = _named(runner.info, settings.backend.served_model_name)
    limits = limits_of(settings)
    sizing = size(settings, info, limits.max_num_seqs, runner.available_kv_bytes)
    geometry = sizing.geometry
    limits = limits.within(geometry.num_blocks, geometry.block_size)
    try:
        runner.allocate(geometry.num_blocks, geometry.block_size, geometry.num_host_blocks)
    except MemoryError as error:
        raise InvalidSettings(
            f"{geometry.num_blocks} device and {geometry.num_host_blocks} host blocks of "
            f"{geometry.block_bytes / 2**20:.2f} MiB cannot be allocated: {error}"
        ) from error
    config = EngineConfig(
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=sizing.max_model_len,
        eos_token_ids=info.text.eos_token_ids,
        num_host_blocks=geometry.num_host_blocks,
        paged=geometry.paged,
        pin_budget_blocks=geometry.pin_budget_blocks,
        check_integrity=settings.process.check_integrity,
    )
    grammars = grammars_of(info)
    loaded = partial(
        Loaded,
        info=info,
        geometry=geometry,
        max_model_len=sizing.max_model_len,
        limits=limits,
        grammars=grammars,
    )
    if not settings.process.enable_faults:
        return loaded(WorkerEngine(runner, config, grammars=grammars))
    poison = settings.process.poison_token
    faults = Faults([] if poison is None else [Fault(FaultKind.CRASH, token_id=poison)])
    engine = WorkerEngine(FaultyRunner(runner, faults, ProcessFaults()), config, faults, grammars)
    return loaded(engine, faults=faults)


def grammars_of(info: LoadedModel) -> Grammars | None:
    """Return what holds output to grammars, or None where that cannot be done; the log says why."""
    text = info.text
    tokenizer = text.tokenizer_files["tokenizer.json"].decode()
    try:
        grammars = Grammars(Vocabulary(tokenizer, info.vocab_size, text.eos_token_ids))
    except GrammarError as error:
        log.warning("no_structured_output", problem=str(error))
        return None
    if info.runner != "sim":
        grammars.warm_up()
    return grammars


def _named(info: LoadedModel, names: tuple[str, ...]) -> LoadedModel:
    """Return the description of a model under the names that it is to be served by."""
    if not names:
        return info
    for name in names:
        if name in info.adapters:
            raise InvalidSettings(f"served_model_name {name}: an adapter has this name")
    return replace(info, model_id=names[0], aliases=names[1:])


class ProcessFaults:
    """What faults do to this process; see `worker_svc.engine.faults.FaultEffects`."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def hang(self) -> None:
        """Never come back."""
        threading.Event().wait()

    def crash(self) -> None:
        """End the process as the kernel would."""
        os.kill(os.getpid(), signal.SIGKILL)


def load_runner(settings: WorkerSettings, progress: Progress) -> ModelRunner:
    """Load the model with the runner that was asked for; only that one is imported.

    Raises:
        ModelLoadError: the model cannot be loaded.
        InvalidSettings: the runner cannot work with the settings.
    """
    match settings.backend.runner:
        case "torch":
            return _load_torch(settings, progress)
        case "vllm":
            return _load_vllm(settings, progress)
        case "sim":
            return _load_sim(settings, progress)


# ruff: noqa: PLC0415 - what runners need takes seconds to import, and need not be installed


def _load_torch(settings: WorkerSettings, progress: Progress) -> ModelRunner:
    from worker_svc.models.resolve import resolve

    backend, batch = settings.backend, settings.batch
    # First: a wrong name should not have to wait for torch.
    model = resolve(backend.model, progress, backend.revision)
    from worker_svc.runner import torch

    limits = limits_of(settings)
    options = torch.TorchOptions(
        device=backend.device,
        dtype=backend.dtype,
        num_threads=backend.num_threads,
        max_model_len=batch.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        padded=backend.padded,
    )
    return torch.load(model, options, progress)


def _load_vllm(settings: WorkerSettings, progress: Progress) -> ModelRunner:
    from worker_svc.models.resolve import resolve
    from worker_svc.runner.vllm import installed
    from worker_svc.runner.vllm.gguf_folder import hf_folder_of
    from worker_svc.runner.vllm.runner import VllmRunner
    from worker_svc.runner.vllm.settings import VllmSettings, chosen_dtype

    backend, batch, vllm = settings.backend, settings.batch, settings.vllm
    installed.prepare()
    model = resolve(backend.model, progress, backend.revision, with_code=vllm.trust_remote_code)
    limits = limits_of(settings)
    is_gguf = model.format is ModelFormat.GGUF
    dtype = chosen_dtype(backend.dtype, dequantized=is_gguf)
    vllm_settings = VllmSettings(
        model=hf_folder_of(model, dtype, progress) if is_gguf else model.path,
        dtype=dtype,
        kv_cache_dtype=vllm.kv_cache_dtype,
        quantization=vllm.quantization,
        enforce_eager=vllm.enforce_eager,
        tensor_parallel_size=vllm.tensor_parallel_size,
        trust_remote_code=vllm.trust_remote_code,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=batch.max_model_len,
        block_size=settings.tokens_per_block,
        gpu_memory_utilization=settings.kv.gpu_memory_utilization,
        args=vllm.vllm_args,
    )
    return VllmRunner(vllm_settings, _text_info(model, "vllm"), progress)


def _load_sim(settings: WorkerSettings, progress: Progress) -> ModelRunner:
    from worker_svc.runner.sim import BUILT_IN, SimRunner, built_in_model, simulated

    backend, profile = settings.backend, settings.sim.sim_profile
    try:
        times = StepTimes.builtin() if profile is None else StepTimes.load(profile)
    except StepTimesError as error:
        raise InvalidSettings(f"sim_profile {error}") from None
    if backend.model == BUILT_IN:
        info = built_in_model()
    else:
        from worker_svc.models.resolve import resolve

        info = simulated(_text_info(resolve(backend.model, progress, backend.revision), "sim"))
    return SimRunner(info, times, settings.sim.sim_speed, padded=backend.padded)


def _text_info(model: ResolvedModel, runner: str) -> LoadedModel:
    """Return what a model's files say of text; the runner fills in what concerns the weights."""
    from worker_svc.models.gguf import open_gguf_file
    from worker_svc.models.gguf_text import gguf_text
    from worker_svc.models.text import folder_text

    if model.format is ModelFormat.GGUF:
        text = gguf_text(open_gguf_file(model.path).metadata, model.path)
    else:
        text = folder_text(model.path)
    return LoadedModel(model.model_id, model.revision, text, runner)
