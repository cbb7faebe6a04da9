"""A stack of processes, before any is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.stack import Stack, StackConfig


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])  # noqa: S104
def test_stack_reaches_itself_by_an_address_that_certificates_are_for(
    host: str, reached: str, tmp_path: Path
) -> None:
    stack = Stack(
        StackConfig(host=host, port=1, worker_port=2, gateway_port=3, insecure=True, folder=tmp_path)
    )

    assert [child.address for child in stack.workers] == [f"{reached}:2"]
    assert stack.endpoints == f"{reached}:1"
