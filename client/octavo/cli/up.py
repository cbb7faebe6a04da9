"""`octavo up`: the whole stack on this machine, for as long as the command runs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final

from octavo.cli import output
from octavo.cli.services import load_settings
from octavo.client import Client
from octavo.stack import Stack, StackConfig, StackError, free_port

_WATCH_S: Final = 0.2
_LOGS_KEPT: Final = 10


class _Stop(BaseException):
    """A signal asks for the end."""


class _CannotBegin(Exception):
    """What the user asked for cannot be had here."""


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument(
        "--model", default="demo", help="model folder, GGUF file, hub name, or `demo` (default: demo)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers to run (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=50051, help="port of the scheduler; 0 is any free one (default: 50051)"
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
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where the logs go")
    parser.add_argument(
        "--scheduler-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further argument of the scheduler",
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
    """Run until interrupted, or until a child ends; return the exit code."""
    if arguments.workers < 1:
        output.fail("--workers must be at least 1")
        return 2
    gateway_port = arguments.gateway_port
    if gateway_port is not None and not _has_gateway():
        output.note("no HTTP gateway: pip install 'octavo[gateway]'")
        gateway_port = None
    for service in ("scheduler", "worker"):
        load_settings(service)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    stack = None
    try:
        stack = _stack(arguments, gateway_port)
        stack.start()
        output.note(f"starting, logs are in {stack.folder}")
        with output.ProgressLine() as show:
            stack.wait_ready(arguments.ready_timeout, show)
        _announce(stack)
        while True:
            stack.check()
            time.sleep(_WATCH_S)
    except _Stop:
        return 0
    except _CannotBegin as error:
        output.fail(str(error))
        return 2
    except StackError as error:
        output.fail(str(error))
        if stack is not None:
            output.note(f"logs are in {stack.folder}")
        return 1
    finally:
        # From here on nothing may interrupt the end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if stack is not None:
            stack.stop()


def _stack(arguments: argparse.Namespace, gateway_port: int | None) -> Stack:
    """Return the stack that the flags describe.

    Raises:
        _CannotBegin: an address or the folder of the logs cannot be used.
    """
    try:
        return Stack(
            StackConfig(
                model=arguments.model,
                num_workers=arguments.workers,
                host=arguments.host,
                port=arguments.port or free_port(arguments.host),
                worker_port=arguments.worker_port or None,
                scheduler_args=arguments.scheduler_arg,
                worker_args=arguments.worker_arg,
                gateway_port=gateway_port,
                gateway_args=arguments.gateway_arg,
                folder=arguments.logs or _log_folder(),
            )
        )
    except OSError as error:  # The folder of the logs has a name, an address has none.
        raise _CannotBegin(f"{error.filename or arguments.host}: {error.strerror}") from error


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
    state.mkdir(parents=True, exist_ok=True)
    old = sorted(
        (entry for entry in state.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime
    )
    for folder in old[: max(0, len(old) - _LOGS_KEPT + 1)]:
        for log in folder.glob("*.log"):
            log.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    return state / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")


def _announce(stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        models = ", ".join(f"{model.id} (context {model.max_model_len})" for model in client.models())
    default = stack.endpoint == "127.0.0.1:50051"
    flag = "" if default else f" --endpoint {stack.endpoint}"
    print(f"{output.paint('Octavo is up.', 'green')}  {models}")
    print(f"  scheduler  {stack.endpoint}")
    for worker in stack.workers:
        print(f"  {worker.name:<9}  {worker.address}")
    if stack.gateway is not None:
        print(f"  gateway    http://{stack.gateway.address}/v1")
    print()
    print("Try it:")
    print(output.paint(f"  octavo chat{flag} --message 'What is the capital of France?'", "bold"))
    print()
    print("Ctrl-C stops everything.", flush=True)
