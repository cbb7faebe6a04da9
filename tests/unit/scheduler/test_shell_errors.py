"""Every reason has a code, and an error says the same thing in both of its trailers."""

from __future__ import annotations

import ast
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2
from octavo.service.status import trailing_metadata
from octavo.v1 import common_pb2

import scheduler_svc
from scheduler_svc.core.errors import CoreError, Reason
from scheduler_svc.errors import CODES, ServiceError


def test_every_reason_of_the_core_has_a_code() -> None:
    assert set(Reason) <= set(CODES)


def test_every_reason_that_the_shell_raises_has_a_code() -> None:
    root = Path(scheduler_svc.__file__).parent
    raised = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                reason = node.args[0] if node.args else None
                if node.func.id == "ServiceError" and isinstance(reason, ast.Constant):
                    raised.add(reason.value)
    assert "SLOW_CONSUMER" in raised
    assert raised <= set(CODES)


def test_no_fault_of_a_client_is_internal() -> None:
    internal = {reason for reason, code in CODES.items() if code is grpc.StatusCode.INTERNAL}
    assert internal == {"STEP_FAILED", "INTERNAL"}


def test_error_travels_with_retry_delay_violations_and_metadata() -> None:
    error = ServiceError(
        "QUEUE_FULL",
        "the queue is full",
        retry_after_s=1.25,
        violations=[("text", "is too much")],
        metadata={"limit": "500"},
    )
    trailers = dict(trailing_metadata(error.to_proto()))
    proto = common_pb2.Error.FromString(trailers["octavo-error-bin"])
    assert (proto.code, proto.reason, proto.retry_delay_ms) == (8, "QUEUE_FULL", 1250)
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    for detail, packed in zip((info, retry, bad), status.details, strict=True):
        assert packed.Unpack(detail)
    assert (info.reason, info.domain, info.metadata["limit"]) == ("QUEUE_FULL", "octavo", "500")
    assert retry.retry_delay.ToMilliseconds() == 1250
    assert bad.field_violations[0].field == "text"


def test_error_of_the_core_keeps_its_facts() -> None:
    core = CoreError(Reason.QUEUE_TIMEOUT, "still queued", metadata={"phase": "queued"})
    error = ServiceError.from_core(core)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.to_proto().metadata["phase"] == "queued"


def test_error_never_outgrows_the_room_for_trailers() -> None:
    violations = [(f"chat.messages[{i}].content", "\udcff" * 10_000) for i in range(1000)]
    error = ServiceError.invalid(*violations)
    assert sum(len(value) for _, value in trailing_metadata(error.to_proto())) < 6000
