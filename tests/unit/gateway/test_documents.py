"""What the documents say of parameters is what the gateway does."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.gateway.schemas import ChatRequest, CompletionRequest
from octavo.gateway.translate import HEADERS

DOCS = Path(__file__).parents[3] / "docs"


def test_every_parameter_is_in_the_table() -> None:
    page = (DOCS / "coming-from-vllm-serve.md").read_text()
    told = set(re.findall(r"`([a-z_]+)", page))

    for kind in (CompletionRequest, ChatRequest):
        names = {field.alias or name for name, field in kind.model_fields.items()}
        assert names - told - {"tool_choice"} == set()


def test_every_header_is_explained() -> None:
    page = (DOCS / "gateway.md").read_text()

    assert [name for name in HEADERS if f"`{name}`" not in page] == []
