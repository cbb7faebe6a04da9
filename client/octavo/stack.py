"""Schedulers and their workers as child processes of this one, none of which outlives it.

For `octavo up`, for tests and for measurements. Start a stack from a thread that lives as long as the
stack does: on Linux the children die with it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from octavo.client import Client
from octavo.errors import OctavoError, UnavailableError
from octavo.service.address import local_host
from octavo.service.private import FOLDER_MODE, private, write_private
from octavo.service.tls import Tls

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is (0 to 1)."""

_POLL_S: Final = 0.05
_RESTART_GRACE_S: Final = 5.0
_SECRET_FILE: Final = "OCTAVO_WORKER_SECRET_FILE"  # noqa: S105 - a variable
_PARTS: Final = ("scheduler", "worker", "gateway")
_FIRST_METRICS_PORT: Final = 9464
_DRAIN_GRACE_S: Final = 30.0
_DRAIN_MARGIN_S: Final = 10.0
"""What a process may take beyond its own grace before it counts as stuck."""
_LAST_LINES: Final = 8
_LOADING: Final = "the model is being loaded"
"""In what a worker answers until it is ready."""
_ERROR_LEVELS: Final = ("error", "critical")


class StackError(Exception):
    """The stack cannot start or go on; the message is the child's own word where there is one."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """The end of the child's log, where it says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What to start. Arguments are those of the services' commands, and come last."""

    model: str | Sequence[str] = "demo"
    """Several are served beside each other, each by workers of its own."""
    num_workers: int = 1
    """Of each model."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Port of the scheduler; None is any free one."""
    standby: bool = False
    """Whether a second scheduler stands by, on any free port."""
    worker_port: int | None = None
    """Port of the first worker; the others follow. None is any free ones."""
    scheduler_args: Sequence[str] = ()
    worker_args: Sequence[str] = ()
    gateway_port: int | None = None
    """Port of an HTTP gateway; 0 is any free one, None is no gateway."""
    gateway_args: Sequence[str] = ()
    insecure: bool = False
    """Whether `host` may be one that others reach in plaintext."""
    certs: Path | None = None
    """Folder of `octavo certs`: every port and every hop has mutual TLS with its certificates."""
    metrics: bool = False
    """Whether schedulers and workers serve metrics: on their usual ports where these are free."""
    folder: Path | None = None
    """Where the logs go; None is a new temporary folder."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the children."""


class Child:
    """One process of the stack and its log."""

    def __init__(
        self, name: str, address: str, arguments: Sequence[str], log: Path, env: dict[str, str]
    ) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._arguments = tuple(arguments)
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process as last started."""
        if self._process is None:
            raise StackError(f"{self.name} was never started")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again; the log goes on."""
        command = [
            sys.executable,
            "-m",
            "octavo._child",
            str(os.getpid()),
            "octavo.cli.main",
            *self._arguments,
        ]
        with open(self.log, "ab", opener=private) as log:
            self._read = log.tell()
            self._process = subprocess.Popen(  # noqa: S603 # our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                process_group=0,  # Ctrl-C is for the supervisor, which then ends its children in order.
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; nothing happens when it is gone."""
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Yield the log records that came since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                record = _record(line)
                if record is not None:
                    yield record

    def last_lines(self) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def account(self) -> str:
        """Return how the process ended and its word for why: an error that it logged, or its last line."""
        code = self.process.returncode
        logged, last_line = None, "it said nothing"
        for line in self.log.read_bytes().splitlines():
            record = _record(line)
            if record is not None and record.get("level") in _ERROR_LEVELS:
                logged = str(record.get("problem") or record.get("event"))
            if line.strip():
                last_line = line.decode(errors="replace").strip()
        if code >= 0:
            return f"{self.name} ended with exit code {code}: {logged or last_line}"
        # Killed from outside: it may not have had the time to say anything.
        killed = f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{killed}: {logged}" if logged else killed


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Stack:
    """The processes of one stack. Use it in a `with` statement, or call `stop()`."""

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self.folder = config.folder or Path(tempfile.mkdtemp(prefix="octavo-"))
        self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._env = self._secure()
        host = config.host
        self.models = (config.model,) if isinstance(config.model, str) else tuple(config.model)
        num_workers = config.num_workers * len(self.models)
        scheduler_port, standby_port, gateway_port, *ports = free_ports(3 + num_workers, host)
        if config.worker_port is not None:
            ports = [config.worker_port + index for index in range(num_workers)]
        num_metrics = 1 + num_workers + config.standby
        self._metrics_ports = _metrics_ports(num_metrics, host) if config.metrics else []
        self.workers = [self._worker(index, port) for index, port in enumerate(ports)]
        self.scheduler = self._scheduler(config.port or scheduler_port)
        self.standby = self._standby(standby_port) if config.standby else None
        self.gateway = (
            self._gateway(config.gateway_port or gateway_port) if config.gateway_port is not None else None
        )

    @property
    def endpoint(self) -> str:
        """Address of the scheduler."""
        return self.scheduler.address

    @property
    def endpoints(self) -> str:
        """Addresses of all schedulers as clients take them, the preferred one first."""
        return ",".join(child.address for child in self.schedulers)

    @property
    def schedulers(self) -> list[Child]:
        """The preferred one first."""
        return [self.scheduler, *([self.standby] if self.standby is not None else [])]

    @property
    def children(self) -> list[Child]:
        """All processes, in the order in which they are stopped."""
        gateway = [self.gateway] if self.gateway is not None else []
        return [*gateway, *self.schedulers, *self.workers]

    @property
    def tls(self) -> Tls | None:
        """How its ports are spoken to: the services take their certificates from the environment."""
        return Tls.from_environment({**os.environ, **self._env})

    @property
    def worker_secret(self) -> str:
        """What schedulers present to the workers."""
        path = self._env.get(_SECRET_FILE) or os.environ[_SECRET_FILE]
        return Path(path).read_text(encoding="utf-8").split()[0]

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """Where metrics are served, by name of the process; empty without `StackConfig.metrics`."""
        names = ("scheduler", *(worker.name for worker in self.workers), "standby")
        return {name: self._address(port) for name, port in zip(names, self._metrics_ports, strict=False)}

    def _worker(self, index: int, port: int) -> Child:
        model = self.models[index // self.config.num_workers]
        arguments = ["worker", *self._listen(port), "--model", model, *self._metrics_flag(1 + index)]
        return self._child(f"worker-{index}", self._address(port), [*arguments, *self.config.worker_args])

    def _scheduler(self, port: int) -> Child:
        return self._scheduler_child("scheduler", port, self._metrics_flag(0))

    def _standby(self, port: int) -> Child:
        flags = "--rank", "1", *self._metrics_flag(-1)
        return self._scheduler_child("standby", port, flags)

    def _scheduler_child(self, name: str, port: int, flags: Sequence[str]) -> Child:
        workers = ",".join(worker.address for worker in self.workers)
        arguments = ["scheduler", *self._listen(port), "--workers", workers, *flags]
        return self._child(name, self._address(port), [*arguments, *self.config.scheduler_args])

    def _gateway(self, port: int) -> Child:
        arguments = ["gateway", *self._listen(port), "--endpoint", self.endpoints]
        return self._child("gateway", self._address(port), [*arguments, *self.config.gateway_args])

    def _listen(self, port: int) -> tuple[str, str]:
        return "--listen", f"{self.config.host}:{port}"

    def _address(self, port: int) -> str:
        """Return where the stack itself reaches a port: no certificate is for 0.0.0.0."""
        return f"{local_host(self.config.host)}:{port}"

    def _metrics_flag(self, index: int) -> tuple[str, str]:
        ports = self._metrics_ports
        return "--metrics-port", str(ports[index]) if ports else "none"

    def _child(self, name: str, address: str, arguments: Sequence[str]) -> Child:
        return Child(name, address, arguments, self.folder / f"{name}.log", self._env)

    def _secure(self) -> dict[str, str]:
        """Return the environment of the children, with a secret that its schedulers and workers share."""
        env = (
            {**certificates(self.config.certs), **self.config.env}
            if self.config.certs
            else dict(self.config.env)
        )
        if self.config.insecure:
            env["OCTAVO_INSECURE"] = "yes"
        if not (env.get(_SECRET_FILE) or os.environ.get(_SECRET_FILE)):
            path = self.folder / "worker-secret"
            write_private(path, secrets.token_urlsafe(32))
            env[_SECRET_FILE] = str(path)
        return env

    def start(self) -> None:
        """Start every process; does not wait until they serve."""
        for child in reversed(self.children):
            child.start()

    def restart_scheduler(self, scheduler_args: Sequence[str]) -> None:
        """End the scheduler and start one with other arguments, on the same port; the workers stay.

        Does not wait until it serves.
        """
        address = self.scheduler.address
        self.scheduler.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.scheduler.process.wait(_RESTART_GRACE_S)
        self.scheduler.kill()
        self.config = replace(self.config, scheduler_args=tuple(scheduler_args))
        self.scheduler = self._scheduler(int(address.rpartition(":")[2]))
        self.scheduler.start()

    def wait_ready(self, timeout_s: float = 600.0, on_progress: Progress | None = None) -> None:
        """Return when every worker serves through the scheduler.

        Raises:
            StackError: a child ended, or the time is over.
        """
        give_up_at = time.monotonic() + timeout_s
        with Client(self.endpoint, tls=self.tls, connect_timeout=_POLL_S) as client:
            while not self._is_ready(client):
                self.check()
                if time.monotonic() > give_up_at:
                    raise StackError(f"not ready within {timeout_s:g} s; see {self.folder}")
                if on_progress is not None:
                    for what, share in self._progress():
                        on_progress(what, share)
                time.sleep(_POLL_S)
            for child in (self.standby, self.gateway):
                while child is not None and not listens(child.address):
                    self.check()
                    if time.monotonic() > give_up_at:
                        problem = f"{child.name} is not ready within {timeout_s:g} s; see {self.folder}"
                        raise StackError(problem)
                    time.sleep(_POLL_S)

    def _progress(self) -> Iterator[tuple[str, float]]:
        """Yield what the logs have told since the last call: how far models are, what is in the way."""
        for worker in self.workers:
            for record in worker.new_records():
                if record.get("event") == "model_loading":
                    yield str(record.get("what")), float(record.get("percent", 0)) / 100
        for record in self.scheduler.new_records():
            problem = str(record.get("problem"))
            if record.get("event") == "worker_link_ended" and _LOADING not in problem:
                yield f"the scheduler cannot use {record.get('address')}: {problem}", 0.0

    def _is_ready(self, client: Client) -> bool:
        try:
            return sum(worker.state == "ready" for worker in client.status().workers) >= len(self.workers)
        except UnavailableError:
            return False
        except OctavoError as error:
            raise StackError(f"the scheduler answers, but: {error}") from None

    def check(self) -> None:
        """Raise StackError with its own words when a child has ended."""
        for child in self.children:
            if not child.alive:
                raise StackError(child.account())

    def drain(self) -> int:
        """Let what runs end, as long as the services give it; return how many requests were cut.

        Schedulers take nothing new and wait for their grace at most; the gateway's streams end with theirs.
        Workers go on meanwhile. `stop()` ends what is left.
        """
        # First the one that has nothing to run, as a rule: otherwise it would be handed what runs.
        if self.standby is not None:
            self._end([self.standby], _RESTART_GRACE_S)
        started = time.monotonic()
        for child in (self.gateway, self.scheduler):
            if child is not None:
                child.signal(signal.SIGTERM)
        grace_s, cut = _DRAIN_GRACE_S, 0
        while True:
            # Before their logs are read, so that their last words are heard.
            alive = any(child.alive for child in self.schedulers)
            for child in self.schedulers:
                for record in child.new_records():
                    if record.get("event") == "draining":
                        grace_s = float(record.get("grace_s") or grace_s)
                    elif record.get("event") == "drain_grace_over":
                        cut += int(record["live_requests"])
            if not alive or time.monotonic() > started + grace_s + _DRAIN_MARGIN_S:
                return cut
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = 5.0) -> None:
        """End every process, gateway first, workers last; those that take over `grace_s` are killed."""
        standby = [self.standby] if self.standby is not None else []
        for group in ([self.gateway] if self.gateway else [], standby, [self.scheduler], self.workers):
            self._end(group, grace_s)
        for child in self.children:
            child.kill()

    @staticmethod
    def _end(group: Sequence[Child], grace_s: float) -> None:
        """Tell processes to end, and wait until they have, for so long at most."""
        give_up_at = time.monotonic() + grace_s
        for child in group:
            child.signal(signal.SIGTERM)
        for child in group:
            if child.alive:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, give_up_at - time.monotonic()))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def certificates(folder: Path) -> dict[str, str]:
    """Return the variables by which all services and their clients use what `octavo certs` put into a folder.

    Raises:
        OSError: there is no such certificate.
    """
    env = {"OCTAVO_MTLS": "yes", "OCTAVO_TLS_CA": str(folder / "ca.pem")}
    for name, part in (("", "client"), *((f"{part.upper()}_", part) for part in _PARTS)):
        env[f"OCTAVO_{name}TLS_CERT"] = str(folder / f"{part}.pem")
        env[f"OCTAVO_{name}TLS_KEY"] = str(folder / f"{part}-key.pem")
    for variable, file in env.items():
        if variable != "OCTAVO_MTLS":
            Path(file).open("rb").close()
    return env


def listens(address: str) -> bool:
    """Return whether something takes connections there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def _metrics_ports(count: int, host: str) -> list[int]:
    """Return the usual ports, each replaced by any free one where it is taken."""
    ports = free_ports(count, host)
    for index in range(count):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((host.strip("[]"), _FIRST_METRICS_PORT + index))
                ports[index] = _FIRST_METRICS_PORT + index
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on now."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports that nobody listens on now."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host.strip("[]"), 0))
            ports.append(int(probe.getsockname()[1]))
        return ports
