"""The worker process: from settings to exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from octavo.service import descriptors, event_loop, logs
from octavo.service.address import AddressTaken
from octavo.service.loop_lag import LoopLag
from octavo.service.metrics_port import MetricsPort, Refusal
from octavo.service.security import read_secret, server_tls
from octavo.service.settings import SettingsError

from worker_svc.api.convert import describe
from worker_svc.api.door import Door, MetricsDoor
from worker_svc.api.reservation import Reservation
from worker_svc.api.server import Business, WorkerServer, WorkerService
from worker_svc.api.session import Sessions, Terms
from worker_svc.config import WorkerServerSection, WorkerSettings
from worker_svc.engine.loop import EngineLoop, Loaded
from worker_svc.engine.watchdog import StepWatch, Watchdog
from worker_svc.errors import InvalidSettings, ModelLoadError, WorkerError
from worker_svc.kv.errors import KvError
from worker_svc.metrics import WorkerMetrics
from worker_svc.models.progress import LoadingProgress
from worker_svc.runner.vllm import placement
from worker_svc.start.load import load

EXIT_FAILED: Final = 1
EXIT_CODES: Final[dict[type[WorkerError | AddressTaken], int]] = {
    InvalidSettings: 2,
    ModelLoadError: 3,
    AddressTaken: 4,
}
"""For a worker that cannot start. One that cannot go on exits with EXIT_FAILED, a drained one with 0."""

_CLOSE_S: Final = 1.0
_LAST_WORDS_S: Final = 0.2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
log = structlog.get_logger(__name__)


def run(settings: WorkerSettings) -> int:
    """Serve until told to stop; return the exit code.

    A runner that hangs cannot keep the process alive: then this function does not return, it exits.
    """
    settings.start_logging()
    descriptors.raise_limit()
    # Threads that spin while they wait starve each other as soon as anything else uses the cores: on two
    # busy cores a step took 20 times as long. libgomp reads this when torch is loaded, which is later.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if settings.backend.runner == "vllm":
        placement.enter(settings.vllm.tensor_parallel_size, settings.backend.num_threads)
    worker = WorkerProcess(settings)
    try:
        code = event_loop.run(worker.serve())
    except tuple(EXIT_CODES) as error:
        log.error("worker_cannot_start", reason=error.reason, problem=str(error))  # noqa: TRY400 # no bug, no trace
        code = EXIT_CODES[type(error)]
    if not worker.engine_stopped:
        logs.flush()
        os._exit(code)
    return code


class WorkerProcess:
    """Port, engine thread and signals of one worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.engine_stopped = True
        """Whether the engine's thread is gone, so that the interpreter can end in good order."""
        self._settings = settings
        self._metrics = WorkerMetrics()
        self._service = WorkerService()

    async def serve(self) -> int:
        """Run from start to end and return the exit code.

        Raises:
            WorkerError: the worker cannot start.
        """
        settings = self._settings
        stop = _stop_on_signals()
        tls = server_tls(settings.server)
        metrics_server = None
        if settings.server.metrics_port is not None:
            metrics_server = MetricsPort(
                self._metrics.registry,
                settings.server.host,
                settings.server.metrics_port,
                tls=tls,
                refusal=_metrics_refusal(settings.server.key_file),
            )
        lag = LoopLag(self._metrics.registry)
        lag.start()
        server = WorkerServer(self._service, _door(settings.server), tls)
        port = await server.start(settings.server.host, settings.server.port)
        worker_id = settings.server.worker_id or _name_of(settings.server.host, port)
        log.info(
            "worker_listening",
            worker_id=worker_id,
            port=port,
            metrics_port=metrics_server.port if metrics_server else None,
        )
        on_terminal = sys.stderr.isatty() and settings.process.log_format != "json"
        with LoadingProgress(terminal=on_terminal) as progress:
            watch = StepWatch(settings.process.step_limit_s, settings.process.first_step_limit_s)
            engine_loop = EngineLoop(partial(load, settings, progress), watch=watch)
            engine_loop.start()
            self.engine_stopped = False
            await _first(engine_loop.ready, engine_loop.ended, stop)
        # Not before: what loads a model may hold the interpreter for minutes.
        watchdog = Watchdog(watch, partial(_end_serving, server, asyncio.get_running_loop()))
        watchdog.start()
        try:
            if engine_loop.ready.done():
                await self._serve(server, worker_id, engine_loop, stop)
            if engine_loop.ended.done():
                engine_loop.ended.result()
        except (WorkerError, KvError) as error:
            if type(error) in EXIT_CODES:
                raise
            log.critical("engine_died", reason=error.reason, problem=str(error), exc_info=error)
            return EXIT_FAILED
        except Exception as error:
            log.critical("engine_died", reason="BUG", problem=repr(error), exc_info=error)
            return EXIT_FAILED
        finally:
            self._metrics.set_ready(False)
            self._service.close()
            lag.stop()
            await server.stop(_CLOSE_S)
            self.engine_stopped = engine_loop.stop(_CLOSE_S)
            if engine_loop.ready.done() and (grammars := engine_loop.ready.result().grammars) is not None:
                grammars.close()
            watchdog.stop()
        log.info("worker_stopped", worker_id=worker_id)
        return 0

    async def _serve(
        self, server: WorkerServer, worker_id: str, engine_loop: EngineLoop, stop: asyncio.Future[str]
    ) -> None:
        """Serve until a signal comes and what runs is gone, or the engine has ended."""
        loaded = engine_loop.ready.result()
        terms = self._terms(worker_id, loaded)
        reservation = Reservation(self._settings.server.preferred_grace_s)
        silence_s = self._settings.server.scheduler_silence_s
        sessions = Sessions(
            terms, engine_loop, self._metrics, loaded.faults, reservation, scheduler_silence_s=silence_s
        )
        self._metrics.describe(loaded.info, terms.geometry)
        self._metrics.observe_pool(await engine_loop.call(lambda engine: engine.pool_report()))
        self._service.open(Business(describe(loaded.info, terms), sessions, loaded.faults))
        await server.set_serving(serving=True)
        self._metrics.set_ready(True)
        geometry = terms.geometry
        log.info(
            "worker_ready",
            worker_id=worker_id,
            incarnation=terms.incarnation,
            model=loaded.info.model_id,
            aliases=loaded.info.aliases,
            runner=loaded.info.runner,
            simulated=terms.simulated,
            max_model_len=terms.max_model_len,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            kv_mib=round(geometry.num_blocks * geometry.block_bytes / 2**20),
        )
        log.info(
            "worker_limits",
            max_num_seqs=terms.limits.max_num_seqs,
            max_num_batched_tokens=terms.limits.max_num_batched_tokens,
            reason=terms.limits.reason,
        )
        await _first(engine_loop.ended, stop)
        if engine_loop.ended.done():
            return
        log.info("worker_draining", signal=stop.result(), grace_s=self._settings.process.drain_grace_s)
        await server.set_serving(serving=False)
        self._metrics.set_ready(False)
        sessions.drain(stop.result())
        drained = asyncio.ensure_future(sessions.drained.wait())
        await _first(engine_loop.ended, drained, timeout_s=self._settings.process.drain_grace_s)
        if not drained.done():
            drained.cancel()
            log.warning("drain_grace_over", num_live=sessions.num_live)

    def _terms(self, worker_id: str, loaded: Loaded) -> Terms:
        return Terms(
            worker_id=worker_id,
            incarnation=uuid.uuid4().hex,
            geometry=loaded.geometry,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.info.vocab_size,
            limits=loaded.limits,
            adapters=loaded.info.adapters,
            structured_output=loaded.grammars is not None,
            simulated=loaded.info.runner == "sim",
            # Ranks on a CPU share it.
            num_devices=self._settings.vllm.tensor_parallel_size if loaded.info.device != "cpu" else 1,
        )


def _door(settings: WorkerServerSection) -> Door:
    """Return who may come in at the port.

    Raises:
        SettingsError: the file of secrets cannot be used.
    """
    if settings.worker_secret_file is None:
        if settings.is_reachable and not settings.mtls:
            log.warning(
                "worker_open_to_all",
                listen=settings.listen,
                meaning="whoever reaches this port may run plans, and attach in place of the scheduler",
                remedy="--worker-secret-file, or --mtls",
            )
        return Door(names=settings.scheduler_names if settings.mtls else ())
    return Door(read_secret(settings.worker_secret_file))


def _metrics_refusal(key_file: Path | None) -> Refusal | None:
    """Return who may not see the metrics.

    Raises:
        SettingsError: the key file cannot be used.
    """
    try:
        return MetricsDoor(key_file).refusal if key_file is not None else None
    except (OSError, ValueError) as error:
        raise SettingsError(f"key_file cannot be used: {error}") from None


def _name_of(host: str, port: int) -> str:
    """Return a name that differs between machines: all containers listen on the same wildcard."""
    wildcard = host in {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
    return f"{socket.gethostname() if wildcard else host}:{port}"


def _end_serving(server: WorkerServer, loop: asyncio.AbstractEventLoop) -> None:
    """Say through the health service, from any thread, that no work is taken any more."""
    asyncio.run_coroutine_threadsafe(server.set_serving(serving=False), loop)


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _stop_on_signals() -> asyncio.Future[str]:
    """Return a future that the first signal completes; the second one exits at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            logs.flush(_LAST_WORDS_S)
            os._exit(128 + number)
        stop.set_result(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return stop
