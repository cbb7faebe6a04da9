"""`octavo up`: the whole stack on this machine, for as long as the command runs."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from octavo.cli import output
from octavo.cli.demo import QUESTION
from octavo.cli.services import load_settings
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.service.address import is_loopback
from octavo.service.private import FOLDER_MODE
from octavo.stack import Stack, StackConfig, StackError, free_port
from octavo.supervisor import Supervisor

_WATCH_S: Final = 0.2
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOGS_KEPT: Final = 10


class _Stop(BaseException):
    """A signal asks for the end."""


class _CannotBegin(Exception):
    """What the user asked for cannot be had here."""


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "--model",
        action="append",
        help="model folder, GGUF file, hub name, or `demo` (default: demo); given again, it is served, too",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="workers to run of each model (default: 1)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="with a --host beyond loopback: serve in plaintext, to whoever reaches the ports",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="folder of `octavo certs`: serve all ports over TLS, to those who have a certificate of it",
    )
    parser.add_argument(
        "--port", type=int, default=50051, help="port of the scheduler; 0 is any free one (default: 50051)"
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="run a second scheduler, on any free port, which takes over when the first one is gone",
    )
    parser.add_argument(
        "--worker-port",
        type=int,
        default=50061,
        help="port of the first worker, the others follow; 0 is any free ones (default: 50061)",
    )
    parser.add_argument(
        "--gateway-port",
        type=_port_or_none,
        default=8000,
        metavar="PORT",
        help="port of the HTTP gateway; 0 is any free one, `none` is no gateway (default: 8000)",
    )
    parser.add_argument(
        "--ready-timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds to get ready (default: 1800)",
    )
    parser.add_argument(
        "--metrics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve Prometheus metrics beside each service (default: yes)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where the logs go")
    parser.add_argument(
        "--scheduler-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further argument of each scheduler",
    )
    parser.add_argument(
        "--worker-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further argument of each worker, as in --worker-arg=--max-num-seqs=16",
    )
    parser.add_argument(
        "--gateway-arg", action="append", default=[], metavar="ARG", help="further argument of the gateway"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until interrupted; return the exit code."""
    if arguments.workers < 1:
        output.fail("--workers must be at least 1")
        return 2
    if arguments.gateway_port is not None and not _has_gateway():
        output.note("no HTTP gateway: pip install 'octavo[gateway]'")
        arguments.gateway_port = None
    for service in ("scheduler", "worker"):
        load_settings(service)
    for number in _SIGNALS:
        signal.signal(number, _on_signal)
    stack = None
    try:
        stack = _stack(arguments)
        _serve(stack, arguments.ready_timeout)
    except _Stop:
        if stack is not None:
            with suppress(_Stop):
                _drain(stack)
        return 0
    except _CannotBegin as error:
        output.fail(str(error))
        return 2
    except StackError as error:
        output.fail(str(error))
        output.note("\n".join((*error.log, f"logs are in {stack.folder}" if stack is not None else "")))
        return 1
    finally:
        # From here on nothing may interrupt the end.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if stack is not None:
            stack.stop()


def _serve(stack: Stack, ready_timeout_s: float) -> NoReturn:
    """Start everything, and keep it running until a signal comes.

    Raises:
        StackError: it cannot start.
    """
    stack.start()
    output.note(f"starting, logs are in {stack.folder}")
    with output.ProgressLine() as show:
        stack.wait_ready(ready_timeout_s, show)
    _announce(stack)
    supervisor = Supervisor(stack.children, output.note)
    while True:
        supervisor.poll(time.monotonic())
        time.sleep(_WATCH_S)


def _drain(stack: Stack) -> None:
    """Let requests that run end, and say what was cut.

    Raises:
        _Stop: a second signal, which ends them at once.
    """
    cut = 0
    try:
        cut = live = _live_requests(stack)
        if live:
            output.note(f"finishing {live} request(s); Ctrl-C again stops them at once")
        cut = stack.drain()
    finally:
        if cut:
            output.note(f"{cut} request(s) were cut before their end")


def _live_requests(stack: Stack) -> int:
    """Return how many requests have come and not ended, none where a scheduler cannot tell."""
    live = 0
    for scheduler in stack.schedulers:
        with (
            suppress(OctavoError),
            Client(scheduler.address, tls=stack.tls, connect_timeout=_WATCH_S) as client,
        ):
            live += client.status().live_requests
    return live


def _stack(arguments: argparse.Namespace) -> Stack:
    """Return the stack that the flags describe.

    Raises:
        _CannotBegin: an address or the folder of the logs cannot be used, or everybody could use the stack.
    """
    if not (is_loopback(arguments.host.strip("[]")) or arguments.insecure or _has_keys(arguments)):
        raise _CannotBegin(
            f"--host {arguments.host} lets other machines use the stack: give it keys "
            "(--scheduler-arg=--key-file=FILE), or --insecure where the network is trusted"
        )
    try:
        return Stack(
            StackConfig(
                model=arguments.model or "demo",
                num_workers=arguments.workers,
                host=arguments.host,
                port=arguments.port or free_port(arguments.host),
                standby=arguments.standby,
                worker_port=arguments.worker_port or None,
                scheduler_args=arguments.scheduler_arg,
                worker_args=arguments.worker_arg,
                gateway_port=arguments.gateway_port,
                gateway_args=arguments.gateway_arg,
                insecure=arguments.insecure,
                certs=arguments.tls,
                metrics=arguments.metrics,
                folder=arguments.logs or _log_folder(),
            )
        )
    except OSError as error:  # The folder of the logs has a name, an address has none.
        raise _CannotBegin(f"{error.filename or arguments.host}: {error.strerror}") from error


def _has_keys(arguments: argparse.Namespace) -> bool:
    flags = " ".join(arguments.scheduler_arg)
    variables = "OCTAVO_KEY_FILE", "OCTAVO_SCHEDULER_KEY_FILE"
    return "--key-file" in flags or any(os.environ.get(name) for name in variables)


def _port_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def _has_gateway() -> bool:
    return all(find_spec(name) is not None for name in ("fastapi", "httptools", "uvicorn"))


def _on_signal(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _Stop


def _log_folder() -> Path:
    """Return a new folder for this run's logs, and remove those of old runs."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "octavo" / "up"
    state.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    old = sorted(
        (entry for entry in state.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime
    )
    for folder in old[: max(0, len(old) - _LOGS_KEPT + 1)]:
        for file in (*folder.glob("*.log"), folder / "worker-secret"):
            file.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    return state / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")


def _announce(stack: Stack) -> None:
    scheme = "http" if stack.tls is None else "https"
    with Client(stack.endpoint, tls=stack.tls) as client:
        models = ", ".join(f"{model.id} (context {model.max_model_len})" for model in client.models())
    default = stack.endpoint == "127.0.0.1:50051"
    flag = "" if default and stack.standby is None else f" --endpoint {stack.endpoints}"
    print(f"{output.paint('Octavo is up.', 'green')}  {models}")
    for scheduler in stack.schedulers:
        print(f"  {scheduler.name:<9}  {scheduler.address}")
    for worker in stack.workers:
        print(f"  {worker.name:<9}  {worker.address}")
    scheme = "http" if stack.tls is None else "https"
    if stack.gateway is not None:
        print(f"  gateway    {scheme}://{stack.gateway.address}/v1")
    for name, address in stack.metrics_addresses.items():
        print(f"  metrics    {scheme}://{address}/metrics  ({name})")
    print()
    print("Try it:")
    if stack.config.certs is not None and stack.tls is not None:
        files = (("CA", stack.tls.ca), ("CERT", stack.tls.cert), ("KEY", stack.tls.key))
        print("  export", *(f"OCTAVO_TLS_{name}={shlex.quote(str(path))}" for name, path in files))
    print(output.paint(f"  octavo chat{flag} --message '{QUESTION}'", "bold"))
    print()
    print("Ctrl-C stops everything.", flush=True)
