"""What `import octavo` promises: light to import, and no gRPC type to be seen."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import octavo
import pytest


def test_import_loads_no_grpc_and_no_protobuf() -> None:
    code = "import sys, octavo.protocol.steps; print(sys.modules.keys() & {'grpc', 'google.protobuf'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_help_loads_nothing_that_takes_its_time() -> None:
    code = (
        "import sys; from octavo.cli.main import main; main([]); "
        "print(sys.modules.keys() & {'grpc', 'google.protobuf', 'importlib.metadata', 'asyncio'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "set()"


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        octavo.nothing_here  # noqa: B018


def _foreign(annotation: object) -> bool:
    text = f"{annotation!r} {getattr(annotation, '__module__', '')}"
    return "grpc" in text or "google.protobuf" in text or "octavo.v1" in text


def _annotations(member: object) -> dict[str, object]:
    return typing.get_type_hints(member)


@pytest.mark.parametrize("name", [name for name in octavo.__all__ if inspect.isclass(getattr(octavo, name))])
def test_public_class_shows_no_grpc_type(name: str) -> None:
    cls = getattr(octavo, name)
    members = {
        member_name: member.fget if isinstance(member, property) else member
        for member_name, member in inspect.getmembers(cls)
        if not member_name.startswith("_")
    }
    if name in ("Client", "AsyncClient"):  # the streams are made by their client, never by a user
        members["__init__"] = cls.__init__
    for member_name, member in members.items():
        if inspect.isfunction(member):
            for parameter, annotation in _annotations(member).items():
                assert not _foreign(annotation), f"{name}.{member_name}: {parameter} is {annotation}"
    for base in cls.__mro__:
        assert not _foreign(base.__module__), f"{name} derives from {base}"
