"""Every measurable promise of Octavo, measured when asked: `python -m octavo_lab.scorecard`.

A measure is a function in a module of `octavo_lab.scorecard.measures`:

    @entry("e2e.idle_cpu", "CPU of an idle stack", "share of a core", at_most(0.01))
    def idle_cpu() -> float: ...
"""

from __future__ import annotations

from octavo_lab.scorecard.registry import Entry, Measured, Target, at_least, at_most, entry

__all__ = ["Entry", "Measured", "Target", "at_least", "at_most", "entry"]
