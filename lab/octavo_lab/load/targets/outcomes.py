"""From the words of services to outcomes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import DeadlineExceededError, OctavoError, OverloadedError

from octavo_lab.load.records import Outcome

_OOM: Final = re.compile(r"\bOOM\b|out of memory", re.IGNORECASE)
# By the status, or by the type of an error that comes within a stream, when the status is long gone.
_OUTCOMES: Final[Mapping[int | str | None, Outcome]] = {
    408: Outcome.TIMEOUT,
    429: Outcome.REFUSED,
    503: Outcome.REFUSED,
    504: Outcome.TIMEOUT,
    "timeout_error": Outcome.TIMEOUT,
    "rate_limit_error": Outcome.REFUSED,
    "service_unavailable_error": Outcome.REFUSED,
}
# What Octavo's gateway says with 503 when nothing can serve, loaded or not.
_UNAVAILABLE: Final = frozenset({"no_worker", "unavailable", "unreachable", "cancelled", "client_closed"})
_MAX_REASON_CHARS: Final = 80


def of_octavo(error: OctavoError) -> Outcome:
    """Return the outcome of a request that Octavo ended with an error."""
    if isinstance(error, OverloadedError):
        return Outcome.REFUSED
    if isinstance(error, DeadlineExceededError):
        return Outcome.TIMEOUT
    return Outcome.OOM if _OOM.search(str(error)) else Outcome.ERROR


def of_http(status: int | None, text: str) -> tuple[Outcome, str]:
    """Return the outcome of an HTTP error and its reason.

    `status` is None for an error within a stream: then the body must tell.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    # Servers put the error under `error`, or make it the body.
    error = body.get("error", body) if isinstance(body, dict) else body
    error = error if isinstance(error, dict) else {"reason": error}
    kind, code = error.get("type"), error.get("code")
    words = [word for word in (error.get("reason"), code, kind) if isinstance(word, str) and word]
    reason = words[0] if words else f"HTTP_{status}" if status is not None else "STREAM_ERROR"
    if isinstance(code, int) and status is None:
        status = code
    outcome = _OUTCOMES.get(status) or _OUTCOMES.get(str(kind), Outcome.ERROR)
    if outcome is Outcome.REFUSED and reason in _UNAVAILABLE:
        outcome = Outcome.ERROR
    if outcome is Outcome.ERROR and _OOM.search(text):
        outcome = Outcome.OOM
    return outcome, reason[:_MAX_REASON_CHARS]


def without_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they may be told: without the API key."""
    return {name: value for name, value in options.items() if name != "api_key"}
