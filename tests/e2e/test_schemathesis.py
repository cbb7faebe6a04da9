"""Requests that schemathesis draws from the OpenAPI document: whatever they are, the gateway has an answer.

The short form; `make schemathesis` draws more.
"""

from __future__ import annotations

import pytest
from octavo_lab.scorecard.gateway_clients import BIN
from octavo_lab.scorecard.measures.gateway import server_errors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BIN / "schemathesis").exists(), reason="not installed: make clients"),
]


def test_no_request_of_the_document_is_answered_with_a_server_error() -> None:
    found = server_errors(max_examples=3)

    assert found.value == 0, found.details
    assert found.details["answers of generation"]["200"] > 0
