"""Records in files: dataclasses as JSON, written whole or not at all, read back as what they were."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from octavo_lab.command import BenchError

RecordT = TypeVar("RecordT")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or as it was, even if the machine stops now."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_record(path: Path, record: object) -> None:
    """Write a dataclass, whole or not at all."""
    write_whole(path, TypeAdapter(type(record)).dump_json(record, indent=1).decode())


def read_record(path: Path, kind: type[RecordT]) -> RecordT:
    """Return the dataclass in a file; BenchError: it cannot be read, or holds none of this version."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BenchError(f"{path}: not of this version ({where}: {first['msg']})") from error
