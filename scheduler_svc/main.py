"""The scheduler process: from settings to exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, NoReturn

import structlog
from octavo.keys import KeyFile, KeyFileError
from octavo.service import event_loop, logs
from octavo.service.address import AddressTaken, check_address
from prometheus_client import disable_created_metrics, start_http_server

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.admission import Admission
from scheduler_svc.admission.intake import Intake
from scheduler_svc.admission.key_file import KeyFileWatch
from scheduler_svc.admission.load import LoadGate
from scheduler_svc.admission.tenants import Tenants
from scheduler_svc.api.generation import GenerationService
from scheduler_svc.api.operations import PinService, StatusService
from scheduler_svc.api.server import SchedulerServer, Services, SessionService
from scheduler_svc.api.session import SessionLimits
from scheduler_svc.api.status import StatusBoard
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core import CoreSnapshot, SchedulerCore
from scheduler_svc.core.overload import Level
from scheduler_svc.driver import Driver
from scheduler_svc.fleet.models import ModelRegistry
from scheduler_svc.fleet.pins import PinBoard
from scheduler_svc.fleet.worker_link import Epochs, LinkContext
from scheduler_svc.fleet.workers import Fleet
from scheduler_svc.live.accounts import Accounts
from scheduler_svc.observe.metrics import Metrics
from scheduler_svc.planlog import PlanLogError, PlanLogWriter, RecordingCore
from scheduler_svc.text.tokenizer_pool import MAX_PENDING, TokenizerPool

log = structlog.get_logger()

EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2
EXIT_ADDRESS_TAKEN: Final = 4
_CLOSE_S: Final = 1.0
_SCRAPE_TIMEOUT_S: Final = 5.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Metrics are rendered by a thread, which would otherwise keep the event loop waiting for 5 ms at a time.
_SWITCH_INTERVAL_S: Final = 0.0005


def run(settings: SchedulerSettings) -> int:
    """Serve until told to stop; return the exit code."""
    logs.configure(settings.log_format, settings.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped library
    try:
        return event_loop.run(_run(settings))
    except AddressTaken as error:
        log.error("scheduler_cannot_start", reason=error.reason, problem=str(error))  # noqa: TRY400 - no bug
        return EXIT_ADDRESS_TAKEN
    except KeyFileError as error:
        log.error("scheduler_cannot_start", reason="KEY_FILE", problem=f"{settings.key_file}: {error}")  # noqa: TRY400 - no bug
        return EXIT_SETTINGS
    except PlanLogError as error:
        log.error("scheduler_cannot_start", reason="PLAN_LOG_UNWRITABLE", problem=str(error))  # noqa: TRY400 - no bug
        return EXIT_FAILED


async def _run(settings: SchedulerSettings) -> int:
    """Serve; the first signal drains, the second exits at once."""
    process = SchedulerProcess(settings)
    signalled = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal signalled
        if signalled:
            os._exit(128 + number)
        signalled = True
        process.stop(number.name, settings.drain_grace_s)

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    _quiet_garbage_collector()
    return await process.serve()


def _quiet_garbage_collector() -> None:
    """Keep the collector from stopping the event loop.

    A full collection over all that the imports have made takes 45 ms, so that is set apart; what
    requests leave behind is mostly freed by reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _make_core(settings: SchedulerSettings) -> SchedulerCore:
    """Return the core, one that keeps a plan log if that is wanted."""
    config = settings.core_config()
    if settings.plan_log is None:
        return SchedulerCore(config)
    max_bytes = settings.plan_log_max_mib << 20
    return RecordingCore(
        config, PlanLogWriter(settings.plan_log, max_bytes=max_bytes, files=settings.plan_log_files)
    )


def _watch(name: str, endless: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
    """Run something beside the driver; should a bug end it, the rest goes on, and the log says so."""

    def ended(task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled():
            log.critical("watcher_died", task=name, exc_info=task.exception())

    task = asyncio.create_task(endless)
    task.add_done_callback(ended)
    return task


class SchedulerProcess:
    """Everything of one scheduler, wired together. Made inside of an event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.scheduler_id = settings.scheduler_id or f"scheduler-{uuid.uuid4().hex[:12]}"
        self.metrics = Metrics()
        self.accounts = Accounts(self.metrics, time.monotonic)
        self.driver = Driver(_make_core(settings), self.accounts, self.metrics)
        self.access = Access(self.metrics)
        self.tenants = Tenants(self.metrics)
        self._key_file: KeyFileWatch | None = None
        if settings.key_file is not None:
            self._key_file = KeyFileWatch(settings.key_file, self.metrics, self._keys_changed)
            self._key_file.load()
            if not settings.cache_secret.get_secret_value():
                log.warning(
                    "cache_secret_missing",
                    meaning="who knows a tenant's name can compute the keys of its cached prefixes",
                    remedy="set OCTAVO_SCHEDULER_CACHE_SECRET to a random value that outlives restarts",
                )
        # What may wait in the queue may also come all at once.
        max_pending = max(MAX_PENDING, settings.max_waiting_requests)
        self.pool = TokenizerPool(settings.tokenizer_processes, settings.tokenizer_timeout_s, max_pending)
        self.models = ModelRegistry(self.pool)
        self._settings = settings
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        pins = PinBoard()
        self._board = board = StatusBoard(
            self.scheduler_id,
            self.driver,
            self.accounts,
            self.tenants,
            lambda: [link.status for link in self.fleet],
            settings.price_per_gpu_hour,
        )
        board.pins = pins
        self.metrics.price.set(settings.price_per_gpu_hour or 0.0)
        if self._key_file is not None:
            watch = self._key_file
            board.key_file_problem = lambda: watch.problem
        self.fleet = Fleet(
            settings.workers,
            LinkContext(
                scheduler_id=self.scheduler_id,
                window=settings.window,
                epochs=Epochs(),
                driver=self.driver,
                models=self.models,
                on_change=self._workers_changed,
                on_ready=pins.welcome,
                on_step=board.step,
            ),
        )
        self.models.fleet_is_tried = lambda: self.fleet.is_tried
        self._server, self._sessions = self._make_server(board, pins)

    @property
    def stopping(self) -> bool:
        """Whether the process is on its way to its end."""
        return self._stop.done()

    def stop(self, cause: str, grace_s: float | None) -> None:
        """Begin to end: refuse new requests, and give those here this long, or as long as they take.

        Of two calls, the one whose grace is over first decides.
        """
        log.info("draining", cause=cause, grace_s=grace_s)
        if grace_s is not None:
            asyncio.get_running_loop().call_later(grace_s, self._grace_over.set)
        if not self._stop.done():
            self._stop.set_result(None)

    async def serve(self, listening: asyncio.Future[int] | None = None) -> int:
        """Run from start to end and return the exit code.

        Args:
            listening: is given the port once there is one.

        Raises:
            AddressTaken: a port cannot be had.
        """
        settings = self._settings
        metrics_port, close_metrics = self._serve_metrics()
        port = await self._server.start(settings.host, settings.port)
        self.fleet.start()
        driving = asyncio.create_task(self.driver.run(), name="driver")
        vital: list[asyncio.Task[Any]] = [driving, *self.pool.start()]
        watching = [_watch("history", self._board.history.run())]
        if self._key_file is not None:
            watching.append(_watch("key_file", self._key_file.run()))
        log.info(
            "scheduler_listening",
            scheduler_id=self.scheduler_id,
            port=port,
            metrics_port=metrics_port,
            workers=settings.workers,
        )
        if listening is not None:
            listening.set_result(port)
        try:
            await asyncio.wait([*vital, self._stop], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                await self._drain(vital)
            for task in vital:
                if task.done():
                    bug = None if task.cancelled() else task.exception()
                    log.critical("task_died", task=task.get_name(), exc_info=bug)
                    return EXIT_FAILED
        finally:
            await self._server.stop(_CLOSE_S)
            await self.fleet.close()
            await self.pool.close()
            driving.cancel()
            for task in watching:
                task.cancel()
            close_metrics()
        log.info("scheduler_stopped", scheduler_id=self.scheduler_id)
        return 0

    # Inside --------------------------------------------------------------------------------------

    def _make_server(self, board: StatusBoard, pins: PinBoard) -> tuple[SchedulerServer, SessionService]:
        settings, driver, models, pool = self._settings, self.driver, self.models, self.pool
        admission = Admission(models, pool, LoadGate(models, driver, settings), settings)
        intake = Intake(self.access, self.tenants, admission, driver, self.accounts)
        limits = SessionLimits(
            settings.max_backlog_bytes,
            settings.max_session_requests,
            seats=lambda: driver.num_seats,
            shedding=self._shedding,
        )
        sessions = SessionService(intake, driver, limits)
        driver.on_level = sessions.top_up
        status = StatusService(
            board,
            self.fleet,
            driver,
            begin_drain=lambda grace_s: self.stop("Drain", grace_s),
            access=self.access,
            faults_enabled=settings.enable_faults,
        )
        services = Services(
            GenerationService(intake, driver, models, pool, settings.max_backlog_bytes),
            sessions,
            status,
            PinService(pins, self.fleet, models, admission, self.access),
        )
        guard = self.access if settings.key_file is not None else None
        return SchedulerServer(services, settings.max_streams, guard), sessions

    def _shedding(self, models: Collection[str]) -> bool:
        """Return whether one of these models, or every one there is, sheds the batch class."""
        level_of = self.driver.level_of
        if models:
            return max(level_of(model) for model in models) >= Level.SHED_BATCH
        return min((level_of(model.id) for model in self.models), default=Level.NORMAL) >= Level.SHED_BATCH

    def _keys_changed(self, key_file: KeyFile) -> None:
        """The key file has been read, for the first time or again."""
        self.access.key_file = key_file
        self.tenants.keep(key_file.tenants)
        self.driver.weigh_tenants({tenant.name: tenant.weight for tenant in key_file.tenants.values()})

    def _workers_changed(self) -> None:
        """A worker has come or gone."""
        self._sessions.top_up()
        self.metrics.devices.set(sum(link.status.devices for link in self.fleet if link.attached))
        serving = self.fleet.num_ready > 0 and not self.stopping
        task = asyncio.create_task(self._server.set_serving(serving=serving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, vital: list[asyncio.Task[Any]]) -> None:
        """Wait until no request is live, the grace is over, or a task died without which none would end."""
        await self._server.set_serving(serving=False)
        self.driver.drain()
        idle = asyncio.create_task(self.driver.wait_idle())
        grace_over = asyncio.create_task(self._grace_over.wait())
        try:
            await asyncio.wait([idle, grace_over, *vital], return_when=asyncio.FIRST_COMPLETED)
            if grace_over.done() and not idle.done():
                log.warning("drain_grace_over", live_requests=self.accounts.live)
        finally:
            idle.cancel()
            grace_over.cancel()

    def _serve_metrics(self) -> tuple[int | None, Callable[[], None]]:
        """Serve metrics over HTTP, from a thread of its own; return the port, and what ends it."""
        settings = self._settings
        if settings.metrics_port is None:
            return None, lambda: None
        check_address(settings.host, settings.metrics_port)
        loop = asyncio.get_running_loop()

        async def snapshot() -> CoreSnapshot:
            return self.driver.snapshot()

        self.metrics.watch(
            lambda: asyncio.run_coroutine_threadsafe(snapshot(), loop).result(_SCRAPE_TIMEOUT_S)
        )
        server, _ = start_http_server(settings.metrics_port, settings.host, self.metrics.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()

        return server.server_port, close
