"""`octavo drain`: take a worker or a scheduler out of service, and let what runs there end."""

from __future__ import annotations

import argparse
import time
from typing import Final

from octavo._sdk.channel import parse_endpoints
from octavo.cli import output, request
from octavo.errors import InvalidRequestError, OctavoError, UnavailableError
from octavo.types import DrainResult

_LOOK_EVERY_S: Final = 0.2


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    worker = what.add_parser("worker", help="it takes nothing new until its process is started anew")
    worker.add_argument("worker", metavar="WORKER", help="its id, as `octavo status` shows it")
    scheduler = what.add_parser("scheduler", help="it takes nothing new, and ends")
    scheduler.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds that running requests get (default: as long as they take)",
    )
    for part in (worker, scheduler):
        part.add_argument("--wait", action="store_true", help="return when nothing runs there any more")
        part.add_argument("--json", action="store_true", help="print as JSON")
        request.add_endpoint(part)


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    endpoints = parse_endpoints(arguments.endpoint)
    if arguments.what == "worker":
        endpoint, drained = _drain_worker(arguments, endpoints)
    elif len(endpoints) > 1:
        problem = f"must name one scheduler, got {', '.join(endpoints)}"
        raise InvalidRequestError.of_fields(("endpoint", problem))
    else:
        endpoint = endpoints[0]
        with request.connect(arguments, endpoint) as client:
            drained = client.drain(grace=arguments.grace)
    if arguments.json:
        print(output.to_json(drained))
    else:
        print(f"draining, {drained.running} running and {drained.waiting} waiting", flush=True)
    if arguments.wait:
        _wait(arguments, endpoint)
    return 0


def _drain_worker(arguments: argparse.Namespace, endpoints: tuple[str, ...]) -> tuple[str, DrainResult]:
    """Drain a worker through the one of the schedulers that it is attached to."""
    failure: OctavoError | None = None
    for endpoint in endpoints:
        try:
            with request.connect(arguments, endpoint) as client:
                return endpoint, client.drain(arguments.worker)
        except OctavoError as error:
            if error.reason != "UNKNOWN_WORKER" and not isinstance(error, UnavailableError):
                raise
            failure = failure or error
    assert failure is not None
    raise failure


def _wait(arguments: argparse.Namespace, endpoint: str) -> None:
    """Return when the worker has nothing to run, or the scheduler is gone."""
    while True:
        try:
            with request.connect(arguments, endpoint, _LOOK_EVERY_S) as client:
                status = client.status()
        except UnavailableError:
            return
        if arguments.what == "worker":
            running = {worker.worker_id: worker.running for worker in status.workers}
            if not running.get(arguments.worker):
                return
        time.sleep(_LOOK_EVERY_S)
