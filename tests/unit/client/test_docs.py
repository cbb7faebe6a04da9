"""The documents hold what they promise: links lead somewhere, every reason is explained."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from octavo import errors
from octavo.cli.main import ADDED, COMMANDS
from octavo.gateway.errors import failure_of
from octavo.v1 import operations_pb2

from scheduler_svc.errors import CODES

ROOT = Path(__file__).parents[3]
OURS = {"InternalError", "UnavailableError", "ClientClosedError"}
"""What a fault of the service is raised as."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_test_that_security_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/security.md").read_text())

    assert len(named) > 20
    assert [one for one in named if f"def {one[1]}" not in (ROOT / one[0]).read_text()] == []


def test_every_command_is_in_the_table_of_commands() -> None:
    page = (ROOT / "docs/cli.md").read_text()

    assert [name for name in COMMANDS | ADDED if f"| `octavo {name}` |" not in page] == []


def reasons_of_the_sdk() -> set[str]:
    """Reasons in the SDK's code: of records that it makes, and of classes that it raises without one."""
    found = set()
    for path in (ROOT / "client/octavo/_sdk").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            kind = getattr(errors, name, None)
            given = [word.value for word in node.keywords if word.arg == "reason"]
            if name == "ErrorInfo":
                given += node.args[:1]
            elif isinstance(kind, type) and issubclass(kind, errors.OctavoError) and len(node.args) == 1:
                found.add(kind.default_reason)
            found |= {one.value for one in given if isinstance(one, ast.Constant)}
    return found


def test_every_reason_is_explained_with_its_code_its_class_its_status_and_whether_to_try_again() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    row = r"^\| `([A-Z_]+)` \| (?:`([A-Z_]+)`)? ?\| `(\w+)` \| (\d+) \| (\w+) \| \w"
    explained = {reason: rest for reason, *rest in re.findall(row, page, re.MULTILINE)}
    from_sdk = reasons_of_the_sdk()
    assert {"FORWARDING_KEY_REFUSED", "MESSAGE_TOO_LARGE", "CLIENT_CLOSED", "DEADLINE_EXCEEDED"} <= from_sdk

    assert {*map(str, CODES), *from_sdk, "UNREACHABLE"} == set(explained)
    for reason, (code, kind, status, again) in explained.items():
        info = errors.ErrorInfo(reason, "", CODES[reason].value[0] if reason in CODES else 2)
        error = errors.error_of(info) if reason in CODES else getattr(errors, kind)("", info)
        failure = failure_of(error)
        assert code in ("", CODES[reason].name if reason in CODES else reason)
        assert type(error).__name__ == kind
        assert (str(failure.status), {True: "yes", False: "no", None: "perhaps"}[failure.retry]) == (
            status,
            again,
        ), reason
        # Faults of the service are the only ones that a client may call the service's.
        assert (failure.status >= 500) == (kind in OURS or reason in ("CANCELLED", "SLOW_CONSUMER")), reason


def test_every_code_of_the_gateways_own_is_explained_with_its_status() -> None:
    page = (ROOT / "docs/gateway.md").read_text()
    made = set()
    for path in (ROOT / "client/octavo/gateway").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Failure", "busy"):
                status, _, code = (getattr(one, "value", None) for one in node.args[:3])
                if isinstance(status, int) and isinstance(code, str):
                    made.add((str(status), code))
    assert ("431", "headers_too_large") in made

    assert [one for one in made if f"| `{one[1]}` | {one[0]} |" not in page] == []


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
