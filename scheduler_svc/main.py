"""The scheduler process: from settings to exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable
from typing import Final

import structlog
from prometheus_client import start_http_server

from scheduler_svc import logs
from scheduler_svc.accounts import Accounts
from scheduler_svc.admission import Admission
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core import CoreSnapshot, SchedulerCore
from scheduler_svc.driver import Driver
from scheduler_svc.fleet import Fleet
from scheduler_svc.generation import GenerationService
from scheduler_svc.intake import Intake
from scheduler_svc.metrics import Metrics
from scheduler_svc.models import ModelRegistry
from scheduler_svc.operations import PinService, StatusService
from scheduler_svc.pins import PinBoard
from scheduler_svc.server import AddressTaken, SchedulerServer, Services, SessionService, check_address
from scheduler_svc.session import SessionLimits
from scheduler_svc.status import StatusBoard
from scheduler_svc.tokenizer_pool import TokenizerPool
from scheduler_svc.worker_link import Epochs, LinkContext

log = structlog.get_logger()

EXIT_FAILED: Final = 1
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
    try:
        return asyncio.run(SchedulerProcess(settings).serve())
    except AddressTaken as error:
        log.error("scheduler_cannot_start", reason="ADDRESS_TAKEN", problem=str(error))  # noqa: TRY400 - no bug
        return EXIT_ADDRESS_TAKEN


class SchedulerProcess:
    """Everything of one scheduler, wired together. Made and used inside an event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.scheduler_id = settings.scheduler_id or f"scheduler-{uuid.uuid4().hex[:12]}"
        self.port = 0
        self.metrics_port: int | None = None
        self._drain_grace_s: float | None = settings.drain_grace_s

    async def serve(self) -> int:
        """Run from start to end and return the exit code.

        Raises:
            AddressTaken: a port cannot be had.
        """
        self._stop = asyncio.get_running_loop().create_future()
        self._watch_signals()
        self._build()
        settings = self._settings
        close_metrics = self._serve_metrics()
        self.port = await self._server.start(settings.host, settings.port)
        self._pool.start()
        self._fleet.start()
        driving = asyncio.create_task(self._driver.run())
        log.info(
            "scheduler_listening",
            scheduler_id=self.scheduler_id,
            port=self.port,
            metrics_port=self.metrics_port,
            workers=settings.workers,
        )
        try:
            await asyncio.wait([driving, self._stop], return_when=asyncio.FIRST_COMPLETED)
            if driving.done():
                log.critical("driver_died", exc_info=driving.exception())
                return EXIT_FAILED
            await self._drain()
        finally:
            await self._server.stop(_CLOSE_S)
            await self._fleet.close()
            await self._pool.close()
            driving.cancel()
            close_metrics()
        log.info("scheduler_stopped", scheduler_id=self.scheduler_id)
        return 0

    def begin_drain(self, grace_s: float | None) -> None:
        """Begin to end: refuse new requests, and give those here this long, or as long as they take."""
        if not self._stop.done():
            self._drain_grace_s = grace_s
            self._stop.set_result("Drain")

    # Inside --------------------------------------------------------------------------------------

    def _build(self) -> None:
        settings = self._settings
        clock = asyncio.get_running_loop().time
        metrics = Metrics()
        accounts = Accounts(metrics, clock)
        self._driver = driver = Driver(SchedulerCore(settings.core_config()), accounts, metrics)
        self._pool = pool = TokenizerPool(settings.tokenizer_processes, settings.tokenizer_timeout_s)
        models = ModelRegistry(pool)
        pins = PinBoard()
        board = StatusBoard(
            self.scheduler_id,
            driver,
            accounts,
            lambda: [link.status for link in self._fleet],
            settings.price_per_gpu_hour,
        )
        context = LinkContext(
            scheduler_id=self.scheduler_id,
            window=settings.window,
            epochs=Epochs(),
            driver=driver,
            models=models,
            worker_ids={},
            on_change=self._workers_changed,
            on_ready=pins.welcome,
            on_step=board.step,
        )
        self._fleet = fleet = Fleet(settings.workers, context)
        admission = Admission(models, pool, settings)
        intake = Intake(admission, driver, accounts)
        limits = SessionLimits(
            settings.max_backlog_bytes,
            settings.max_session_requests,
            lambda: sum(worker.max_num_seqs for worker in driver.snapshot().workers),
        )
        self._sessions = SessionService(intake, driver, limits)
        self._server = SchedulerServer(
            Services(
                GenerationService(intake, driver, models, pool, settings.max_backlog_bytes),
                self._sessions,
                StatusService(
                    board,
                    fleet,
                    driver,
                    begin_drain=self.begin_drain,
                    faults_enabled=settings.enable_faults,
                ),
                PinService(pins, fleet, models, pool, admission),
            ),
            settings.max_streams,
        )
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def _workers_changed(self) -> None:
        """A worker has come or gone."""
        self._sessions.top_up()
        serving = self._fleet.num_ready > 0 and not self._stop.done()
        task = asyncio.create_task(self._server.set_serving(serving=serving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        log.info("draining", cause=self._stop.result(), grace_s=self._drain_grace_s)
        await self._server.set_serving(serving=False)
        self._driver.drain()
        try:
            async with asyncio.timeout(self._drain_grace_s):
                await self._driver.wait_idle()
        except TimeoutError:
            log.warning("drain_grace_over", live_requests=self._driver.snapshot().live_requests)

    def _serve_metrics(self) -> Callable[[], None]:
        """Serve metrics over HTTP, from a thread of its own; return what ends it."""
        settings = self._settings
        if settings.metrics_port is None:
            return lambda: None
        check_address(settings.host, settings.metrics_port)
        loop = asyncio.get_running_loop()

        async def snapshot() -> CoreSnapshot:
            return self._driver.snapshot()

        self._metrics.watch(
            lambda: asyncio.run_coroutine_threadsafe(snapshot(), loop).result(_SCRAPE_TIMEOUT_S)
        )
        server, _ = start_http_server(settings.metrics_port, settings.host, self._metrics.registry)
        self.metrics_port = server.server_port

        def close() -> None:
            server.shutdown()
            server.server_close()

        return close

    def _watch_signals(self) -> None:
        """The first signal drains, the second exits at once."""
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if self._stop.done():
                os._exit(128 + number)
            self._stop.set_result(number.name)

        for number in _SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
