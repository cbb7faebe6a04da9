"""What the programs of this folder share: checks that are named, told, and counted."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

BASE_URL, MODEL = sys.argv[1:3]
SEES_FIT = "--auto" in sys.argv
"""The model is a stand-in that calls a tool whenever it is offered some, and then says what came of it."""
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
CITY["additionalProperties"] = False
"""Arguments of the tool `weather`. Bounded, as the model of the tests is too small to find an end."""


def run(program: str, *checks: Callable[[], Any]) -> int:
    """Run checks; return the exit code."""
    failed = 0
    for check in checks:
        try:
            outcome = check()
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
            print(f"ok      {check.__name__}", flush=True)
        except Exception:  # noqa: BLE001 - told, and counted
            failed += 1
            print(f"FAILED  {check.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{program}: {len(checks) - failed} of {len(checks)} work")
    return 1 if failed else 0


def refusal(call: Callable[[], object]) -> Exception:
    """What a call raises, which it has to."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is looked at
        return error
    raise AssertionError("it was not refused")
