"""Arguments of the commands that send requests, and how answers are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octavo.cli import output
from octavo.client import Client
from octavo.errors import InvalidRequestError
from octavo.sampling import SCALARS, StructuredOutput
from octavo.service.tls import Tls
from octavo.types import Delta, GenerateResult

# Flag -> type, what it does. Names are those of the SDK's options.
_NUMBERS: Final = (
    *((name, one.kind, one.flag_help) for name, one in SCALARS.items() if one.flag_help),
    ("queue_timeout", float, "seconds to wait in the queue at most"),
    ("ttft_deadline", float, "seconds until the first token at most"),
    ("deadline", float, "seconds until the end at most"),
)


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the service."""
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="scheduler to talk to; several, separated by commas, stand in for each other "
        "(default: $OCTAVO_ENDPOINT or 127.0.0.1:50051)",
    )
    # Not the key itself: whoever may list processes would see it.
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file that holds the API key and nothing else (default: the key is in $OCTAVO_API_KEY)",
    )
    add_tls(parser)
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds to try to connect (default: 5)",
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the files of TLS."""
    for name, what in (
        ("ca", "authorities by which the service is checked, in PEM; makes every endpoint speak TLS"),
        ("cert", "certificate to present, in PEM"),
        ("key", "its private key"),
    ):
        variable = f"OCTAVO_TLS_{name.upper()}"
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=f"{what} (default: ${variable})")


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Return what the flags and the environment say of TLS, if they say anything."""
    given = {name: getattr(arguments, f"tls_{name}") for name in ("ca", "cert", "key")}
    given = {name: path for name, path in given.items() if path is not None}
    return replace(Tls.from_environment() or Tls(), **given) if given else None


def key_of(arguments: argparse.Namespace) -> str | None:
    """Return the API key in the file that was named; None leaves it to the environment.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    return None if arguments.api_key_file is None else _text_of("api_key_file", arguments.api_key_file)


def _text_of(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidRequestError.of_fields((field, f"{path}: {why}")) from None


def connect(
    arguments: argparse.Namespace, endpoint: str | None = None, timeout_s: float | None = None
) -> Client:
    """Return a client for the service that the arguments name, or for another endpoint."""
    return Client(
        endpoint or arguments.endpoint,
        api_key=key_of(arguments),
        tls=tls_of(arguments),
        connect_timeout=arguments.connect_timeout if timeout_s is None else timeout_s,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that become options of a request."""
    group = parser.add_argument_group("request")
    group.add_argument("--model", metavar="NAME", help="model to use, where several are served")
    for name, kind, what in _NUMBERS:
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=what)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of text")
    group.add_argument("--priority", choices=("interactive", "standard", "batch"), help="class of service")
    constraints = parser.add_argument_group("constraint on the output").add_mutually_exclusive_group()
    constraints.add_argument("--json-object", action="store_true", help="any JSON object")
    constraints.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="JSON that follows the schema in this file"
    )
    constraints.add_argument("--regex", metavar="PATTERN", help="a text that the pattern matches as a whole")
    constraints.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of these texts; may be repeated"
    )
    constraints.add_argument(
        "--grammar", type=Path, metavar="FILE", help="a text of the grammar (GBNF) in this file"
    )


def _structured(arguments: argparse.Namespace) -> StructuredOutput | None:
    """Return the constraint that was given, if any; raises InvalidRequestError for a file that is none."""
    if arguments.json_object:
        return StructuredOutput(json_object=True)
    if arguments.json_schema is not None:
        return StructuredOutput(json_schema=_text_of("json_schema", arguments.json_schema), strict=True)
    if arguments.regex is not None:
        return StructuredOutput(regex=arguments.regex)
    if arguments.choice is not None:
        return StructuredOutput(choice=tuple(arguments.choice))
    if arguments.grammar is not None:
        return StructuredOutput(grammar=_text_of("grammar", arguments.grammar))
    return None


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given."""
    names = ("model", "stop", "ignore_eos", "priority", *(name for name, _, _ in _NUMBERS))
    given = {name: getattr(arguments, name) for name in names}
    given["structured"] = _structured(arguments)
    return {name: value for name, value in given.items() if value is not None}


def print_deltas(deltas: Iterable[Delta]) -> None:
    """Print text as it comes."""
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_cost(result: GenerateResult) -> None:
    """Say what an answer took, where a person is looking."""
    if sys.stderr.isatty():
        output.note(cost(result))


def cost(result: GenerateResult) -> str:
    """Return what an answer took, in words."""
    usage, timings = result.usage, result.timings
    parts = [
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens",
        f"first after {output.duration(timings.ttft_s)}",
    ]
    if timings.tpot_s > 0:
        parts.append(f"then {1 / timings.tpot_s:.0f} per second")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} from the cache")
    if usage.trimmed_tokens:
        parts.append(f"{usage.trimmed_tokens} trimmed away under load")
    return ", ".join(parts)
