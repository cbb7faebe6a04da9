"""What goes wrong, as OpenAI's clients expect it: a status, a body, and when to try again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from starlette.types import Send

from octavo.errors import (
    AccessDeniedError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from octavo.protocol.bounds import short

# The first class that fits decides.
_STATUS: Final[tuple[tuple[type[OctavoError], int], ...]] = (
    (InvalidRequestError, 400),
    (UnsupportedError, 400),
    (NotFoundError, 404),
    (AccessDeniedError, 401),
    (DeadlineExceededError, 408),
    (OverloadedError, 429),
    (UnavailableError, 503),
)
# Reasons whose status is not that of their class.
_STATUS_OF_REASON: Final[Mapping[str, int]] = {
    "DUPLICATE_REQUEST_ID": 409,
    "MESSAGE_TOO_LARGE": 413,
    "LOOPBACK_REQUIRED": 403,
    "ROLE_REQUIRED": 403,
    "SLOW_CONSUMER": 503,  # The gateway did not read, which is not its client's fault.
    "CANCELLED": 503,
    "CLIENT_CLOSED": 503,
}
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Codes that programs look for are OpenAI's; all others are our reasons in lower case.
_CODES: Final[Mapping[str, str]] = {
    "UNKNOWN_MODEL": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "BAD_API_KEY": "invalid_api_key",
    "NO_API_KEY": "invalid_api_key",
}
LEVEL_HEADER: Final = "x-octavo-level"
"""The degradation level of the service."""
CHALLENGE: Final = {"www-authenticate": "Bearer"}
"""Goes with every 401 (RFC 9110, section 11.6.1)."""
_DEFAULT_RETRY_S: Final = 1.0
UNSUPPORTED: Final = "unsupported"
"""Type of the validation error that names parameters known elsewhere and not supported here."""
CONFLICT: Final = "conflict"
"""Type of the validation error that names a parameter which does not go with the others."""
UNKNOWN: Final = "unknown"
"""Type of the validation error that names the first of many parameters which nobody knows."""
_VALIDATION_CODES: Final = {
    UNSUPPORTED: "unsupported_parameter",
    UNKNOWN: "unknown_parameter",
    "extra_forbidden": "unknown_parameter",
}
MAX_FAULTS: Final = 8
"""That are named; the others are found when those are mended."""
_MAX_MESSAGE: Final = 1000
# What pydantic calls the members of unions.
_MEMBERS: Final = frozenset({"str", "int", "float", "list", "NamedTool", "ChosenTool", "AllowedTools"})
# Where the parts of a request came from, by their path in the proto.
_PARAMS: Final[Mapping[str, str]] = {
    "text": "prompt",
    "tokens.ids": "prompt",
    "input": "prompt",
    "chat": "messages",
    "chat.tools_json": "tools",
    "chat.template_vars_json": "chat_template_kwargs",
    "sampling.structured": "response_format",
    "terms.priority": "x-octavo-priority",
    "terms.queue_timeout_ms": "x-octavo-queue-timeout-ms",
    "terms.ttft_deadline_ms": "x-octavo-ttft-deadline-ms",
    "terms.deadline_ms": "x-octavo-deadline-ms",
    "terms.keep_head_tokens": "x-octavo-keep-head-tokens",
    "terms.keep_tail_tokens": "x-octavo-keep-tail-tokens",
    "terms.cache_salt": "cache_salt",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that says what went wrong. `param` names the parameter at fault."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    retry: bool | None = None
    """Whether the same request may be sent again; None leaves it to the client."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, and the event that ends a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = short(self.message, _MAX_MESSAGE)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in the shape of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )
        message = short(self.message, _MAX_MESSAGE)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def with_headers(self, headers: Mapping[str, str]) -> Failure:
        """Return the same answer with more headers."""
        return replace(self, headers={**self.headers, **headers})

    def encoded(self, *, anthropic: bool = False) -> bytes:
        """Return the body as JSON; what is no Unicode in it is replaced."""
        return json.dumps(self.anthropic_body if anthropic else self.body, ensure_ascii=True).encode()

    def all_headers(self) -> dict[str, str]:
        """Return the headers that tell when to try again."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(self.retry_after_s * 1000)))
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        return headers


def busy(status: int, message: str, code: str) -> Failure:
    """Return the refusal of what the gateway has no room for now."""
    return Failure(status, message, code, retry_after_s=_DEFAULT_RETRY_S, retry=True)


async def send_failure(send: Send, failure: Failure, *, anthropic: bool = False) -> None:
    """Send a failure as the whole answer."""
    body = failure.encoded(anthropic=anthropic)
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **failure.all_headers()}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class GatewayError(Exception):
    """A request that the gateway itself refuses."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(param: str | None, message: str, code: str = "invalid_request") -> GatewayError:
    """Return the refusal of a parameter."""
    return GatewayError(Failure(400, message, code, param, retry=False))


def failure_of(error: OctavoError, renamed: Mapping[str, str] | None = None) -> Failure:
    """Return the answer for an error of the service.

    Args:
        error: what the service, or the SDK, said.
        renamed: where a request's parameters have other names than usual, by path in the proto.
    """
    status = _STATUS_OF_REASON.get(error.reason) or next(
        (status for kind, status in _STATUS if isinstance(error, kind)), 500
    )
    code = _CODES.get(error.reason, error.reason.lower())
    message, param = error.message, None
    names = {**_PARAMS, **(renamed or {})}
    if isinstance(error, InvalidRequestError) and error.violations:
        params = [param_of(violation.field, names) for violation in error.violations]
        param = params[0]
        said = zip(params, (violation.description for violation in error.violations), strict=True)
        message = "; ".join(f"{name}: {what}" for name, what in said)
    elif error.reason == "UNKNOWN_MODEL":
        param = "model"
    elif error.reason == "INVALID_GRAMMAR":
        param = names["sampling.structured"]
        message = message.replace("sampling.structured", param)
    elif isinstance(error, UnsupportedError):
        param = _param_in(message, names)
        message = f"{param}: {message}" if param is not None and param not in message else message
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in (429, 503):
        retry_after_s = _DEFAULT_RETRY_S
    # Time that has run out does not come back: trying again by itself would add to the load that took it.
    retry = True if status in (429, 503) else None if status == 409 else False
    headers = dict(CHALLENGE) if status == 401 else {}
    if "level" in error.metadata:
        headers[LEVEL_HEADER] = error.metadata["level"]
    return Failure(status, message, code, param, retry_after_s, retry, headers)


def param_of(path: str, names: Mapping[str, str]) -> str:
    """Return the parameter that a path in the proto came from."""
    if path in names:
        return names[path]
    for head in ("tokens.ids", "token_ids"):
        if path.startswith(f"{head}["):
            return names.get(head, head) + path.removeprefix(head)
    if path.startswith("chat.messages"):
        return path.removeprefix("chat.")
    return path.removeprefix("sampling.").removeprefix("terms.")


_WITHOUT_PATH: Final = ("logit_bias", "logprobs", "thinking_token_budget")


def _param_in(message: str, names: Mapping[str, str]) -> str | None:
    """Return the parameter that a runner's refusal is about; it has words only."""
    if "structured" in message:
        return names["sampling.structured"]
    return next((name for name in _WITHOUT_PATH if name in message), None)


def failure_of_validation(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """Return the answer to a body that is not what the schema says; every fault is named."""
    faults: dict[str, str] = {}
    for error in errors[:MAX_FAULTS]:
        path = _path(error["loc"])
        if error["type"] in (UNSUPPORTED, UNKNOWN, CONFLICT):
            for name in error["ctx"]["names"]:
                faults[f"{path}.{short(name)}" if path else short(name)] = str(error["msg"])
        elif error["type"] == "json_invalid":
            faults[""] = f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
        else:
            faults[path] = _problem(error)
    # A union reports each of its members; the one that fits best has its faults further inside.
    paths = [path for path in faults if not any(_is_inside(other, path) for other in faults)]
    message = "; ".join(f"{path}: {faults[path]}" if path else faults[path] for path in paths)
    code = _VALIDATION_CODES.get(errors[0]["type"], "invalid_request")
    return Failure(400, message, code, paths[0] or None, retry=False)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and path.startswith((f"{outer}.", f"{outer}[")) and bool(outer)


def _path(location: Sequence[str | int]) -> str:
    """Return a path as a person writes it, without the names that pydantic gives to a union's members."""
    path = ""
    for part in location[1:] if location[:1] == ("body",) else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _MEMBERS:
            path += f".{short(part)}" if path else short(part)
    return path


def _problem(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown parameter"
    return str(error["msg"]).removeprefix("Value error, ")
