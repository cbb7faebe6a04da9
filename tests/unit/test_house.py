"""Imports run down: from the laboratory to the services to the client, and from room to room inside each."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "octavo": ROOT / "client",
    "scheduler_svc": ROOT,
    "worker_svc": ROOT,
    "octavo_lab": ROOT / "lab",
}
"""Folder that each top package lies in."""
MAY_IMPORT = {
    "octavo": set[str](),
    "scheduler_svc": {"octavo"},
    "worker_svc": {"octavo"},
    "octavo_lab": {"octavo", "scheduler_svc", "worker_svc"},
}
FLOORS = {
    "scheduler_svc": (
        "__main__ main",
        "process",
        "api",
        "admission",
        "fleet",
        "driver",
        "requests",
        "observe",
        "text",
        "planlog",
        "config",
        "errors",
        "core",
    ),
    "worker_svc": (
        "__main__ main checks",
        "api start",
        "metrics engine",
        "runner",
        "grammar",
        "models kv",
        "config",
        "errors",
    ),
    "octavo": (
        "cli gateway llm",
        "supervisor checks",
        "stack batch_file _child",
        "client",
        "aio",
        "_sdk",
        "status",
        "keys errors",
        "types",
        "protocol structured parsing",
        "sampling service steptimes",
        "v1",
    ),
    "octavo_lab": (
        "bench scorecard",
        "tune ladder",
        "overload chunked fleet compare fragmentation vegeta whatif chaos hardening",
        "serve",
        "datasets",
        "load",
        "sim",
        "traces machine stored report plots",
        "command",
    ),
}
"""Rooms (folders and single files) of each package from the top down; what shares a line does not import
each other."""


@dataclass(frozen=True)
class Source:
    """A file, and the modules that it imports, wherever in it and for whatever reason."""

    name: str
    path: Path
    imports: tuple[str, ...]

    @property
    def room(self) -> str:
        return room_of(self.name)


def top_of(module: str) -> str:
    return module.partition(".")[0]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def module_name(package: str, path: Path) -> str:
    parts = path.relative_to(SOURCES[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def paths() -> dict[str, Path]:
    """All hand-written modules by name."""
    return {
        module_name(package, path): path
        for package, folder in SOURCES.items()
        for path in sorted((folder / package).rglob("*.py"))
    }


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    known = paths()
    return [
        Source(name, path, tuple(imported(ast.parse(path.read_text()), known)))
        for name, path in known.items()
        if ".v1." not in name
    ]


def test_no_package_imports_one_above_it(sources: list[Source]) -> None:
    up = [
        f"{source.name} imports {module}"
        for source in sources
        for module in source.imports
        if top_of(module) in SOURCES
        and top_of(module) not in MAY_IMPORT[top_of(source.name)] | {top_of(source.name)}
    ]

    assert up == []


@pytest.mark.parametrize("package", FLOORS)
def test_no_room_imports_one_above_or_beside_it(sources: list[Source], package: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms.split()}
    mine = [source for source in sources if top_of(source.name) == package and source.room]
    up = [
        f"{source.name} imports {module}"
        for source in mine
        for module in source.imports
        if top_of(module) == package
        and room_of(module)
        and room_of(module) != source.room
        and floor[room_of(module)] <= floor[source.room]
    ]

    assert {source.room for source in mine} - {"v1"} == set(floor) - {"v1"}
    assert up == []


def test_no_files_import_each_other_in_a_circle(sources: list[Source]) -> None:
    packages = {source.name for source in sources if source.path.name == "__init__.py"}
    graph = {
        source.name: {name for name in source.imports if name != source.name and name not in packages}
        for source in sources
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' imports '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("module", ["scheduler_svc.core", "worker_svc.kv"])
def test_pure_room_imports_only_itself_and_the_records_it_is_driven_with(
    sources: list[Source], module: str
) -> None:
    records = {"octavo.protocol.steps", "octavo.protocol.keys", "octavo.sampling"}
    others = {
        f"{source.name} imports {name}"
        for source in sources
        if source.name == module or source.name.startswith(f"{module}.")
        for name in source.imports
        if top_of(name) in SOURCES and not name.startswith(module) and name not in records
    }

    assert others == set()


def test_no_two_classes_share_a_name() -> None:
    """A name that stands for two things must be read twice."""
    where: dict[str, list[str]] = {}
    for name, path in paths().items():
        if ".v1." not in name:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where.setdefault(node.name, []).append(name)

    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}
