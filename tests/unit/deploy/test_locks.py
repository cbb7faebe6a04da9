"""What images pin is what the project asks for, each with hashes: they are installed without another look."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[3]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _images() -> dict[str, list[str]]:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "deploy" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: [word for word in words if word != "--extra"] for name, words in module.IMAGES.items()}


IMAGES: Final = _images()


def requirements(extras: list[str]) -> Iterator[Requirement]:
    """Yield what the project and some of its extras ask for."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    for one in map(Requirement, lines):
        if one.name == PROJECT["name"]:
            yield from requirements(sorted(one.extras))
        elif one.marker is None or one.marker.evaluate({"sys_platform": "linux"}):
            yield one


@pytest.mark.parametrize("image", IMAGES)
def test_lock_has_what_the_project_asks_for(image: str) -> None:
    text = (ROOT / "deploy" / "locks" / f"{image}.txt").read_text()
    pinned = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }
    for one in requirements(IMAGES[image]):
        version = pinned.get(canonicalize_name(one.name))
        assert version is not None, f"{one.name} is not in the lock: make locks"
        assert one.specifier.contains(version), f"{one} and not {version}: make locks"


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "locks").iterdir()), ids=lambda path: path.stem)
def test_every_package_of_a_lock_has_a_hash(path: Path) -> None:
    packages = re.split(r"^(?=\S)", path.read_text(), flags=re.MULTILINE)
    assert all("--hash=sha256:" in package for package in packages if "==" in package.split("\n")[0])
