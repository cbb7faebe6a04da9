"""What hostile input costs those who share a service with who sends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from octavo_lab.hardening.siege import Effect, Siege, worst
from octavo_lab.scorecard import Measurement, at_most, entry, system

_SHOWN = 12


@cache
def _siege() -> Siege:
    """Return one siege of both doors with every body at the size limit, for all that is measured on it."""
    # Faster than any device, so that a wait is the service's and not a long prompt's.
    sim = ("--runner", "sim", "--sim-speed", "10")
    with system.running(model="sim", worker_args=sim, scheduler_args=system.UNSHED, gateway_port=0) as stack:
        siege = Siege(stack)
        siege.run()
    return siege


def _details(siege: Siege, key: Callable[[Effect], Any]) -> dict[str, Any]:
    return {
        "bodies": len(siege.effects),
        "worst": worst(siege.effects, key, _SHOWN),
        "blamed on the service": [str(one) for one in siege.effects if one.is_blamed_on_us],
        "neighbour's streams that were harmed": siege.harmed,
        "longest wait without a body, ms": round(siege.calm_s * 1000),
    }


@entry("hardening.loop_pause_ms", "ms", at_most(100), long=True)
def loop_pause() -> Measurement:
    """longest wait of a neighbour for its next token, over the worst bodies for every RPC and route

    A program builds the bodies from the protobuf descriptors and the OpenAPI document, at the size limit,
    and sent one by one to a stack of real processes.
    """
    siege = _siege()
    pause_s = max(one.pause_s for one in siege.effects)
    return Measurement(pause_s * 1000, _details(siege, lambda one: one.pause_s))


@entry("hardening.rss_growth_mib", "MiB", at_most(256), long=True)
def rss_growth() -> Measurement:
    """memory of the process that grew most, over the same bodies: its peak less what it held before"""
    siege = _siege()
    growth = max(one.growth_bytes for one in siege.effects)
    return Measurement(growth / 2**20, _details(siege, lambda one: one.growth_bytes))
