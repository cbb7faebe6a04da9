"""Times as people write them on a command line."""

from __future__ import annotations

import argparse
import re
from typing import Final

_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Return the seconds of 90, 500ms, 90s, 40m or 1.5h.

    Raises:
        ArgumentTypeError: it is none of these, or no time at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be a time such as 500ms, 90s or 40m, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
