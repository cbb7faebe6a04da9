"""The documents hold what they promise: links lead somewhere, every reason is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from octavo import errors
from octavo.cli.main import ADDED, COMMANDS
from octavo.v1 import operations_pb2

from scheduler_svc.errors import CODES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_command_is_in_the_table_of_commands() -> None:
    page = (ROOT / "docs/cli.md").read_text()

    assert [name for name in COMMANDS | ADDED if f"| `octavo {name}` |" not in page] == []


def test_every_reason_of_the_scheduler_and_the_sdk_is_explained_with_its_code_and_class() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| (?:`([A-Z_]+)`)? ?\| `(\w+)`", page, re.MULTILINE)
    explained = {reason: (code, kind) for reason, code, kind in rows}

    for reason, code in CODES.items():
        raised = type(errors.error_of(errors.ErrorInfo(str(reason), "", code.value[0])))
        assert explained[str(reason)] == (code.name, raised.__name__)
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(
            kind, errors.ClientClosedError | errors.DeadlineExceededError
        ):
            assert kind.default_reason in explained


def test_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()

    assert [
        page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name})" not in index
    ] == []


def test_every_kind_of_fault_is_explained() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    kinds = [name for name, number in operations_pb2.FaultKind.items() if number]

    assert [name for name in kinds if f"| `{name.removeprefix('FAULT_KIND_')}` |" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/sdk.md", "docs/getting-started.md", "docs/faults.md"])
def test_python_examples_compile(page: str) -> None:
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        compile(example, page, "exec")
