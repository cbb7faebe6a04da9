"""Runs on disk: the record, which loses nothing, with its figures beside for those who only want them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo_lab.command import BenchError
from octavo_lab.load.records import RunRecord, from_json, to_json
from octavo_lab.load.summary import Slo, summarize
from octavo_lab.stored import write_whole


def write(run: RunRecord, slo: Slo, path: Path, environment: Mapping[str, Any] | None = None) -> None:
    """Write a run, and the machine that it was driven from, into a folder that there is.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        figures = asdict(summarize(run, slo))
        record = {"environment": dict(environment or {}), "summary": figures, "run": to_json(run)}
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error


def read(path: Path) -> RunRecord:
    """Read a run.

    Raises:
        BenchError: the file cannot be read, or holds none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return from_json(record["run"])
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path} is not a run of octavo bench serve: {error}") from error
