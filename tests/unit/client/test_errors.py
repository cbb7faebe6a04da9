from __future__ import annotations

import pickle

import pytest
from octavo.errors import DeadlineExceededError, ErrorInfo, OctavoError, error_of


@pytest.mark.parametrize("code", range(1, 20))
def test_error_of_any_code_is_an_octavo_error_with_its_reason(code: int) -> None:
    error = error_of(ErrorInfo("SOME_REASON", "what happened", code, retry_after_s=2.0))

    assert isinstance(error, OctavoError)
    assert (error.reason, error.message, error.retry_after_s) == ("SOME_REASON", "what happened", 2.0)
    assert str(error) == "what happened [SOME_REASON]"


@pytest.mark.parametrize(
    ("reason", "metadata", "phase"),
    [
        ("QUEUE_TIMEOUT", {}, "queued"),
        ("DEADLINE_QUEUED", {}, "queued"),
        ("TTFT_DEADLINE", {}, "prefill"),
        ("DEADLINE_RUNNING", {}, "decode"),
        ("DEADLINE_RUNNING", {"phase": "prefill"}, "prefill"),
        ("SOMETHING_ELSE", {}, "unknown"),
    ],
)
def test_deadline_error_tells_its_phase(reason: str, metadata: dict[str, str], phase: str) -> None:
    error = error_of(ErrorInfo(reason, "late", 4, metadata=metadata))

    assert isinstance(error, DeadlineExceededError)
    assert error.phase == phase


def test_error_survives_pickling_with_its_facts() -> None:
    error = error_of(ErrorInfo("QUEUE_FULL", "full", 8, retry_after_s=2.0, metadata={"limit": "500"}))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 # our own

    assert (type(copy), copy.reason, copy.retry_after_s, copy.metadata) == (
        type(error),
        "QUEUE_FULL",
        2.0,
        {"limit": "500"},
    )
