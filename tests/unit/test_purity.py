"""The pure parts import no I/O library, no clock and no chance, directly or through others."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PURE = (
    "scheduler_svc.core",
    "worker_svc.kv",
    "octavo.protocol.steps",
    "octavo.protocol.keys",
    "octavo.sampling",
)
"""Packages with all that is in them, and single modules."""
IO = {
    "asyncio",
    "google",
    "grpc",
    "logging",
    "numpy",
    "pydantic",
    "selectors",
    "socket",
    "structlog",
    "torch",
}
EFFECTS = {"datetime", "io", "os", "pathlib", "random", "subprocess", "threading", "time", "uuid"}
"""Of the standard library: loaded by the interpreter itself, so only the sources can tell."""

_PROBE = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_of(name: str) -> list[str]:
    path = getattr(import_module(name), "__path__", None)
    inside = pkgutil.walk_packages(path, f"{name}.") if path is not None else ()
    return [name, *(module.name for module in inside)]


def imports_of(module: str) -> set[str]:
    file = import_module(module).__file__
    assert file is not None
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("name", PURE)
def test_pure_source_names_no_io_no_clock_and_no_chance(name: str) -> None:
    for module in modules_of(name):
        assert not imports_of(module) & (IO | EFFECTS), module


@pytest.mark.parametrize("name", PURE)
def test_pure_module_brings_no_io_library_along(name: str) -> None:
    command = [sys.executable, "-I", "-c", _PROBE, *modules_of(name)]
    output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert not set(json.loads(output.stdout)) & IO


def test_simulator_brings_no_io_library_along() -> None:
    """It reads traces from files, so it is not pure; but it needs no socket, no event loop and no extra."""
    command = [sys.executable, "-I", "-c", _PROBE, *modules_of("octavo_lab.sim")]
    output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert not set(json.loads(output.stdout)) & IO
