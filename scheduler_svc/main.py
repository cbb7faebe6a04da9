"""The scheduler process: from settings to exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from typing import Final

import structlog
from octavo.keys import KeyFileError
from octavo.service import descriptors, event_loop, logs
from octavo.service.address import AddressTaken
from octavo.service.memory import return_what_is_freed
from prometheus_client import disable_created_metrics

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.planlog import PlanLogError
from scheduler_svc.process import EXIT_FAILED, SchedulerProcess

log = structlog.get_logger()

EXIT_SETTINGS: Final = 2
EXIT_ADDRESS_TAKEN: Final = 4
_LAST_WORDS_S: Final = 0.2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Metrics are rendered by a thread, which would otherwise keep the event loop waiting for 5 ms at a time.
_SWITCH_INTERVAL_S: Final = 0.0005


def run(settings: SchedulerSettings) -> int:
    """Serve until told to stop; return the exit code."""
    settings.start_logging()
    descriptors.raise_limit()
    return_what_is_freed()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped library
    try:
        return event_loop.run(_run(settings))
    except AddressTaken as error:
        log.error("scheduler_cannot_start", reason=error.reason, problem=str(error))  # noqa: TRY400 - no bug
        return EXIT_ADDRESS_TAKEN
    except KeyFileError as error:
        log.error("scheduler_cannot_start", reason="KEY_FILE", problem=f"{settings.access.key_file}: {error}")  # noqa: TRY400 - no bug
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
            logs.flush(_LAST_WORDS_S)
            os._exit(128 + number)
        signalled = True
        process.stop(number.name, settings.process.drain_grace_s)

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
