"""One scheduler: its rooms wired together, and its life from the first port to the last request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Final, NoReturn

import structlog
from octavo.keys import KeyFile
from octavo.service.address import is_loopback
from octavo.service.loop_lag import LoopLag
from octavo.service.memory import MemoryCeiling
from octavo.service.metrics_port import MetricsPort
from octavo.service.security import client_tls, read_secret, server_tls
from octavo.service.settings import SettingsError

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.admission import Admission, InputProcessor
from scheduler_svc.admission.key_file import KeyFileWatch
from scheduler_svc.admission.load import LoadGate
from scheduler_svc.admission.tokens import Tokens, TokenSettingsError
from scheduler_svc.api.generation import GenerationService
from scheduler_svc.api.operations import PinService, StatusService
from scheduler_svc.api.server import SchedulerServer, Services
from scheduler_svc.api.session import SessionLimits, SessionService
from scheduler_svc.api.status import StatusCollector, StatusSources
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core import SchedulerCore
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.absence import AbsenceWatch
from scheduler_svc.fleet.models import ModelRegistry, ServedModel
from scheduler_svc.fleet.pair import FixedPreference, Pair
from scheduler_svc.fleet.pins import PinRegistry
from scheduler_svc.fleet.way import Ways
from scheduler_svc.fleet.worker_link import Epochs, LinkContext
from scheduler_svc.fleet.workers import Fleet
from scheduler_svc.observe.metrics import PlanLogCollector, SchedulerMetrics, watch_core
from scheduler_svc.planlog import PlanLogWriter, RecordingCore
from scheduler_svc.requests.accounts import Accounts
from scheduler_svc.text.tokenizer_pool import MAX_PENDING, TokenizerPool

log = structlog.get_logger()

EXIT_FAILED: Final = 1
_CLOSE_S: Final = 1.0
_HAND_OVER_EVERY_S: Final = 0.2


class SchedulerProcess:
    """Everything of one scheduler. Made inside of an event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.scheduler_id = settings.fleet.scheduler_id or f"scheduler-{uuid.uuid4().hex[:12]}"
        self._settings = settings
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

        self._tls = server_tls(settings.server)
        self._ceiling = MemoryCeiling(settings.server.max_rss_bytes)
        self.metrics = SchedulerMetrics()
        self._lag = LoopLag(self.metrics.registry)
        self.metrics.max_rss.set(self._ceiling.max_rss_bytes)
        self.metrics.price.set(settings.observability.price_per_gpu_hour or 0.0)
        self.accounts = Accounts(self.metrics, time.monotonic)
        self.tenants = self.accounts.tenants
        core = _make_core(settings)
        self.driver = CoreDriver(core, self.accounts, self.metrics)
        self._recording = core if isinstance(core, RecordingCore) else None
        self._plan_log = self._recording.plan_log if self._recording is not None else None
        if self._plan_log is not None:
            self.metrics.registry.register(PlanLogCollector(self._plan_log))

        # What may wait in the queue may also come all at once.
        max_pending = max(MAX_PENDING, settings.queue.max_waiting_requests)
        text = settings.text
        self.pool = TokenizerPool(text.tokenizer_processes, text.tokenizer_timeout_s, max_pending)
        self.models = ModelRegistry(self.pool)
        self._pins = PinRegistry()
        self.pair = Pair(FixedPreference(settings.fleet.rank))
        self.fleet = self._make_fleet()
        timeout_s = settings.fleet.no_worker_timeout_s
        self._absence = AbsenceWatch(self.fleet, self.models, self.driver, timeout_s)
        self.driver.standby_endpoint = lambda: peer.endpoint if (peer := self.pair.standby()) else ""
        self.models.fleet_is_tried = lambda: self.fleet.is_tried

        self.access = Access(self.metrics)
        self._key_file = self._load_keys()
        self.access.tokens = self._load_tokens()
        gate = LoadGate(self.models, self.driver, self._ceiling, settings.queue)
        self._inputs = InputProcessor(self.models, self.pool, gate, settings.access)
        self._admission = Admission(self.access, gate, self._inputs, self.driver, self.accounts)

        self._status = self._make_status()
        server = settings.server
        limits = SessionLimits(server.max_backlog_bytes, server.max_session_requests)
        self._sessions = SessionService(self._admission, self.driver, self.models, limits)
        self.driver.on_level = self._sessions.top_up
        self._server = self._make_server()

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
        server = self._settings.server
        metrics = self._serve_metrics()
        port = await self._server.start(server.host, server.port)
        self.pair.endpoint = self._settings.fleet.advertise or _endpoint(server.host, port)
        self.fleet.start()
        self._lag.start()
        driving = asyncio.create_task(self.driver.run(), name="driver")
        vital: list[asyncio.Task[Any]] = [driving, *self.pool.start()]
        watching = [
            _watch("history", self._status.history.run()),
            _watch("usage", self._status.usage.run()),
            _watch("absence", self._absence.run()),
            _watch("sessions", self._sessions.run()),
        ]
        if self._key_file is not None:
            watching.append(_watch("key_file", self._key_file.run()))
        if self.access.tokens is not None:
            watching.append(_watch("tokens", self.access.tokens.run()))
        log.info(
            "scheduler_listening",
            scheduler_id=self.scheduler_id,
            rank=self._settings.fleet.rank,
            port=port,
            metrics_port=metrics.port if metrics is not None else None,
            workers=self._settings.fleet.workers,
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
            self._lag.stop()
            for task in watching:
                task.cancel()
            if metrics is not None:
                metrics.close()
            if self._recording is not None:
                self._recording.close()
        log.info("scheduler_stopped", scheduler_id=self.scheduler_id)
        return 0

    def _serve_metrics(self) -> MetricsPort | None:
        settings = self._settings.server
        if settings.metrics_port is None:
            return None
        watch_core(self.metrics, self.driver.snapshot)
        return MetricsPort(
            self.metrics.registry,
            settings.host,
            settings.metrics_port,
            tls=self._tls,
            refusal=self.access.metrics_refusal,
        )

    # Rooms ---------------------------------------------------------------------------------------

    def _make_fleet(self) -> Fleet:
        context = LinkContext(
            scheduler_id=self.scheduler_id,
            window=self._settings.planning.window,
            epochs=Epochs(),
            driver=self.driver,
            models=self.models,
            pair=self.pair,
            ways=self._ways(),
            on_change=self._workers_changed,
            on_ready=self._pins.worker_ready,
            on_taken_over=self._taken_over,
        )
        return Fleet(self._settings.fleet.workers, context)

    def _ways(self) -> Ways:
        secret = self._settings.fleet.worker_secret_file
        return Ways(client_tls(self._settings.server), read_secret(secret) if secret is not None else None)

    def _load_keys(self) -> KeyFileWatch | None:
        settings, server = self._settings.access, self._settings.server
        if settings.key_file is None:
            if not is_loopback(server.host):
                log.warning(
                    "scheduler_open_to_all",
                    listen=server.listen,
                    meaning="whoever reaches this port may send requests; operations are for this machine",
                    remedy="listen on loopback, or set --key-file",
                )
            return None
        watch = KeyFileWatch(settings.key_file, self.metrics, self._keys_changed)
        watch.load()
        if not settings.cache_secret.get_secret_value():
            log.warning(
                "cache_secret_missing",
                meaning="who knows a tenant's name can compute the keys of its cached prefixes",
                remedy="set OCTAVO_SCHEDULER_CACHE_SECRET to a random value that outlives restarts",
            )
        return watch

    def _load_tokens(self) -> Tokens | None:
        access = self._settings.access
        if access.jwt_issuer is None and access.jwt_audience is None and access.jwt_jwks is None:
            return None
        if access.key_file is None:
            raise SettingsError("tokens name tenants of the key file: set key_file, too")
        try:
            return Tokens(access)
        except TokenSettingsError as error:
            raise SettingsError(str(error)) from None

    def _make_status(self) -> StatusCollector:
        key_file = self._key_file
        sources = StatusSources(
            self.driver,
            self.accounts,
            self.fleet,
            self._pins,
            self.models,
            self.pair,
            lambda: key_file.problem if key_file is not None else None,
            self._plan_log,
            self._ceiling,
        )
        return StatusCollector(self.scheduler_id, sources, self._settings.observability.price_per_gpu_hour)

    def _make_server(self) -> SchedulerServer:
        server = self._settings.server
        services = Services(
            GenerationService(self._admission, self.driver, self.models, self.pool, server.max_backlog_bytes),
            self._sessions,
            StatusService(
                self._status,
                self.fleet,
                self.driver,
                begin_drain=lambda grace_s: self.stop("Drain", grace_s),
                access=self.access,
                faults_enabled=self._settings.process.enable_faults,
            ),
            PinService(self._pins, self.fleet, self.models, self._inputs, self.access),
        )
        return SchedulerServer(services, server.max_streams, self.access, self._tls)

    # Events --------------------------------------------------------------------------------------

    def _keys_changed(self, key_file: KeyFile) -> None:
        """The key file has been read, for the first time or again."""
        self.access.key_file = key_file
        self.tenants.keep(key_file.tenants)
        self.driver.weigh_tenants({tenant.name: tenant.weight for tenant in key_file.tenants.values()})

    def _taken_over(self, model: ServedModel) -> None:
        """A preferred scheduler has taken a worker of this model."""
        self._absence.taken_over(model)

    def _workers_changed(self) -> None:
        """A worker has come or gone."""
        self._sessions.top_up()
        self.metrics.devices.set(sum(link.status.devices for link in self.fleet if link.attached))
        serving = self.fleet.num_ready > 0 and not self.stopping
        task = asyncio.create_task(self._server.set_serving(serving=serving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, vital: list[asyncio.Task[Any]]) -> None:
        """Wait until no request is live, the grace is over, or a task died without which none would end.

        Then the workers are another scheduler's at once.
        """
        await self._server.set_serving(serving=False)
        self.driver.drain()
        idle = asyncio.create_task(self.driver.wait_idle())
        grace_over = asyncio.create_task(self._grace_over.wait())
        handing_over = asyncio.create_task(self._hand_over())
        try:
            await asyncio.wait([idle, grace_over, *vital], return_when=asyncio.FIRST_COMPLETED)
            if grace_over.done() and not idle.done():
                log.warning("drain_grace_over", live_requests=self.accounts.live)
        finally:
            for task in (idle, grace_over, handing_over):
                task.cancel()
        await self.fleet.leave()

    async def _hand_over(self) -> NoReturn:
        """Give what still runs to a scheduler that stands by, as soon as there is one.

        One that has not been heard of since the drain began may be on its way out, too.
        """
        began = self.driver.clock()
        await asyncio.sleep(self._settings.process.drain_hand_over_s)
        while True:
            if (standby := self.pair.standby(self.driver.clock() - began)) is not None:
                error = ServiceError("DRAINING", "the scheduler is draining", retry_after_s=0.0)
                self.driver.move_all(error.elsewhere(standby.endpoint))
            await asyncio.sleep(_HAND_OVER_EVERY_S)


def _endpoint(host: str, port: int) -> str:
    """Return where clients reach a port, unless it is open on all addresses."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - it is not listened on here
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _make_core(settings: SchedulerSettings) -> SchedulerCore:
    """Return the core, one that keeps a plan log if that is wanted."""
    config, observability = settings.core_config(), settings.observability
    if observability.plan_log is None:
        return SchedulerCore(config)
    max_bytes = observability.plan_log_max_mib << 20
    return RecordingCore(
        config, PlanLogWriter(observability.plan_log, max_bytes=max_bytes, files=observability.plan_log_files)
    )


def _watch(name: str, endless: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
    """Run something beside the driver; should a bug end it, the rest goes on, and the log says so."""

    def ended(task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled():
            log.critical("watcher_died", task=name, exc_info=task.exception())

    task = asyncio.create_task(endless)
    task.add_done_callback(ended)
    return task
