"""Checks of a room that go wrong in every way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

from octavo.checks.finding import Check, Finding, fine


def good() -> Iterator[Finding]:
    print("a library has something to say")  # noqa: T201
    yield fine("all is well")


def crashing() -> Iterator[Finding]:
    yield fine("so far so good")
    os.kill(os.getpid(), signal.SIGILL)


def leaving() -> Iterator[Finding]:
    yield fine("so far so good")
    os._exit(7)


def hanging() -> Iterator[Finding]:
    yield fine("so far so good")
    threading.Event().wait()


def raising() -> Iterator[Finding]:
    yield fine("so far so good")
    raise RuntimeError("a page\nof words")


def exiting() -> Iterator[Finding]:
    sys.exit("no")
    yield fine("never")


CHECKS = (
    Check("good", good),
    Check("crashing", crashing),
    Check("leaving", leaving),
    Check("hanging", hanging, limit_s=0.05),
    Check("raising", raising),
    Check("exiting", exiting),
    Check("last", good),
)
