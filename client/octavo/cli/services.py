"""`octavo scheduler`, `worker` and `gateway`: flags are made from the fields of their settings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, Union, get_args, get_origin

from octavo.cli import output

# Command -> module of the settings, their class, module with `run(settings)`.
_SERVICES: Final = {
    "scheduler": ("scheduler_svc.config", "SchedulerSettings", "scheduler_svc.main"),
    "worker": ("worker_svc.config", "WorkerSettings", "worker_svc.main"),
    "gateway": ("octavo.gateway.config", "GatewaySettings", "octavo.gateway.main"),
}
_METAVARS: Final = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
_GIVEN: Final = "setting:"
"""Prefix of the settings among the parsed arguments."""


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add a flag for each setting, grouped by their sections."""
    settings = load_settings(name)
    parser.usage = f"octavo {name} [FLAG ...]"
    parser.epilog = (
        f"Each flag is also a variable ({settings.prefix()}NAME), and a key of the table of its section "
        f"([{name}.{next(iter(settings.sections()))}] and so on) in the file that --config-file names."
    )
    for title, section in settings.sections().items():
        _add_section(parser.add_argument_group(title, section.__doc__), section)


def _add_section(parser: argparse._ArgumentGroup, section: Any) -> None:
    for field_name, field in section.model_fields.items():
        flag = f"--{field_name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                dest=_GIVEN + field_name,
                default=argparse.SUPPRESS,
                help=_help(field.description, "yes" if field.default else "no"),
            )
        elif get_origin(field.annotation) is dict:
            parser.add_argument(
                flag.removesuffix("s"),
                action="append",
                type=_pair,
                dest=_GIVEN + field_name,
                metavar="NAME=VALUE",
                default=argparse.SUPPRESS,
                help=_help(f"one of the {field.description}; may be repeated", None),
            )
        elif get_origin(field.annotation) is tuple and Ellipsis in get_args(field.annotation):
            parser.add_argument(
                flag,
                action=_Joined,
                nargs="+",
                dest=_GIVEN + field_name,
                metavar="X",
                default=argparse.SUPPRESS,
                help=_help(field.description, field.default),
            )
        else:
            parser.add_argument(
                flag,
                dest=_GIVEN + field_name,
                metavar=_metavar(field.annotation),
                default=argparse.SUPPRESS,
                help=_help(field.description, field.default),
            )


class _Joined(argparse.Action):
    """Takes several values as one text with commas, which the settings take apart."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Note them."""
        del parser, option_string
        setattr(namespace, self.dest, ",".join(values or ()))


def _pair(text: str) -> tuple[str, Any]:
    """Return name and value of `name=value`; a value that is JSON is read as such."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    kinds = list(_parts(annotation))
    return next((shown for kind, shown in _METAVARS.items() if kind in kinds), "X")


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the plain types of a union or of an annotated type."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _help(description: str | None, default: object) -> str:
    text = description or ""
    shown: object = default
    if isinstance(default, tuple):
        shown = ",".join("none" if value is None else str(value) for value in default)
    # What is empty, or hidden, is better described than shown.
    if isinstance(shown, str | int | float) and shown != "":
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit code."""
    name = arguments.command
    given = {
        key.removeprefix(_GIVEN): value for key, value in vars(arguments).items() if key.startswith(_GIVEN)
    }
    # Pairs come from flags that may be repeated.
    given = {key: dict(value) if isinstance(value, list) else value for key, value in given.items()}
    settings_class = load_settings(name)
    try:
        settings = settings_class.load(given)
        code: int = _entry(name)(settings)
    except import_module("octavo.service.settings").SettingsError as error:
        output.fail(str(error))
        return 2
    return code


def _entry(name: str) -> Any:
    """Return what runs a service; exits with advice when its extra is not installed."""
    try:
        return import_module(_SERVICES[name][2]).run
    except ModuleNotFoundError as error:
        _missing(name, error)


def load_settings(name: str) -> Any:
    """Return the class of a service's settings; exits with advice when its extra is not installed."""
    module, class_name, _ = _SERVICES[name]
    try:
        return getattr(import_module(module), class_name)
    except ModuleNotFoundError as error:
        _missing(name, error)


def _missing(name: str, error: ModuleNotFoundError) -> NoReturn:
    output.fail(f"octavo {name} needs {error.name}: pip install 'octavo[{name}]'")
    sys.exit(1)
