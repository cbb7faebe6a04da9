"""From settings to an engine over a loaded model. Runs in the engine's thread."""

from __future__ import annotations

import os
import signal
import threading
import time

from worker_svc.config import WorkerSettings
from worker_svc.engine import Engine, EngineConfig
from worker_svc.errors import SettingsError
from worker_svc.faults import Faults, FaultyRunner
from worker_svc.loop import Loaded
from worker_svc.runner.base import ModelRunner, Progress
from worker_svc.sizing import size


def load(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Load the model, size and allocate the KV memory, and build the engine.

    Raises:
        ModelLoadError: the model cannot be loaded.
        SettingsError: the settings do not fit the model or the machine.
    """
    return build(settings, load_runner(settings, progress))


def build(settings: WorkerSettings, runner: ModelRunner) -> Loaded:
    """Size and allocate the KV memory of a loaded runner, and build the engine.

    Raises:
        SettingsError: the settings do not fit the model or the machine.
    """
    info = runner.info
    sizing = size(settings, info, runner.available_kv_bytes)
    geometry = sizing.geometry
    try:
        runner.allocate(geometry.num_blocks, geometry.block_size, geometry.num_host_blocks)
    except MemoryError as error:
        raise SettingsError(
            f"{geometry.num_blocks} device and {geometry.num_host_blocks} host blocks of "
            f"{geometry.block_bytes / 2**20:.2f} MiB cannot be allocated: {error}"
        ) from error
    config = EngineConfig(
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=sizing.max_model_len,
        eos_token_ids=info.eos_token_ids,
        num_host_blocks=geometry.num_host_blocks,
        paged=geometry.paged,
        pin_budget_blocks=geometry.pin_budget_blocks,
        check_integrity=settings.check_integrity,
    )
    if not settings.enable_faults:
        return Loaded(Engine(runner, config), info, sizing)
    faults = Faults()
    return Loaded(Engine(FaultyRunner(runner, faults, Havoc()), config, faults), info, sizing, faults)


class Havoc:
    """What faults do to this process; see `worker_svc.faults.FaultEffects`."""

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
        SettingsError: the runner cannot work with the settings.
    """
    # ruff: noqa: PLC0415 - torch and vLLM take seconds to import, and need not be installed
    match settings.runner:
        case "sim":
            from worker_svc.runner import sim

            return sim.load(settings)
