"""The reader of google.rpc.Status against the real messages."""

from __future__ import annotations

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from octavo._rpc_status import parse
from octavo.errors import ErrorInfo, FieldViolation

FALLBACK = ErrorInfo("FALLBACK", "fallback", 2)
texts = st.text(max_size=20)


@given(
    code=st.integers(1, 16),
    message=st.text(min_size=1, max_size=40),
    reason=st.text(min_size=1, max_size=20),
    metadata=st.dictionaries(texts, texts, max_size=3),
    delay_ms=st.integers(0, 10_000_000),
    violations=st.lists(st.tuples(texts, texts), max_size=3),
)
def test_status_with_all_details_reads_back(
    code: int,
    message: str,
    reason: str,
    metadata: dict[str, str],
    delay_ms: int,
    violations: list[tuple[str, str]],
) -> None:
    details = (
        error_details_pb2.ErrorInfo(reason=reason, domain="octavo", metadata=metadata),
        error_details_pb2.RetryInfo(
            retry_delay=duration_pb2.Duration(seconds=delay_ms // 1000, nanos=delay_ms % 1000 * 1_000_000)
        ),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
                for field, description in violations
            ]
        ),
        error_details_pb2.Help(),
    )
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)

    info = parse(status.SerializeToString(), FALLBACK)

    assert (info.code, info.message, info.reason) == (code, message, reason)
    assert dict(info.metadata) == metadata
    assert info.retry_after_s is not None
    assert round(info.retry_after_s * 1000) == delay_ms
    assert info.violations == tuple(FieldViolation(field, description) for field, description in violations)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_never_raise(data: bytes) -> None:
    parse(data, FALLBACK)


def test_status_without_details_keeps_the_fallback() -> None:
    assert parse(b"", FALLBACK) == FALLBACK
