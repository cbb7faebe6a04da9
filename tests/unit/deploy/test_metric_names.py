"""Metrics that the runbook and the autoscalers name are ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
SOURCES: Final = ("scheduler_svc", "worker_svc", "client/octavo/gateway", "client/octavo/service")
READERS: Final = (
    "docs/runbook.md",
    "deploy/kubernetes/components/hpa/hpa.yaml",
    "deploy/kubernetes/components/keda/scaledobject.yaml",
)


@pytest.mark.parametrize("reader", READERS)
def test_metrics_that_others_rely_on_exist(reader: str) -> None:
    text = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    declared = set(re.findall(r'"(octavo_[a-z_]+)"', text))
    named = set(re.findall(r"\boctavo_[a-z_]+", (ROOT / reader).read_text()))
    assert named
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} <= declared
