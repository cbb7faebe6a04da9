"""Holds command lines and variables of manifests against our own parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from unittest.mock import patch

from octavo.cli.main import load_command
from octavo.cli.services import load_settings
from octavo.service.settings import SHARED

SERVICES: Final = ("scheduler", "worker", "gateway")


def check_words(words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Fail unless `octavo WORDS` is a command whose flags, and the values of its settings, are right."""
    # A file of settings is there only in the container.
    variables = {key: value for key, value in (environment or {}).items() if not key.endswith("_CONFIG_FILE")}
    name, *rest = words
    parser = argparse.ArgumentParser(prog=f"octavo {name}", allow_abbrev=False)
    load_command(name).configure(parser, name)
    parsed = vars(parser.parse_args(rest))
    if name in SERVICES:
        given = {key.removeprefix("setting:"): value for key, value in parsed.items()}
        given = {key: dict(value) if isinstance(value, list) else value for key, value in given.items()}
        with patch.dict("os.environ", variables):
            load_settings(name).load(given)


def check_environment(names: Iterable[str]) -> None:
    """Fail unless each variable that begins as a service's settings do is one of them."""
    for name in names:
        if name.removeprefix("OCTAVO_").lower() in SHARED:
            continue
        for service in SERVICES:
            settings = load_settings(service)
            if name.startswith(settings.prefix()):
                assert name.removeprefix(settings.prefix()).lower() in settings.section_of(), name
