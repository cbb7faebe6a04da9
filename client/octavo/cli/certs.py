"""`octavo certs`: certificates for TLS between the parts of Octavo, and an authority for them."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.cli import output
from octavo.service.private import FOLDER_MODE
from octavo.service.tls import PARTS

if TYPE_CHECKING:
    from octavo.service.authority import Authority

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the command's arguments."""
    del name
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address under which services are reached, beside their own names and this machine's "
        "loopback; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=365, metavar="N", help="how long certificates are good (default: 365)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it and return the exit code."""
    try:
        from octavo.service.authority import Authority  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        output.fail(f"octavo certs needs {error.name}: pip install 'octavo[certs]'")
        return 1
    folder: Path = arguments.out
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        authority = _authority(Authority, folder)
        authority.issue_all(folder, (*_LOCAL, *arguments.host), timedelta(days=arguments.days))
    except OSError as error:
        output.fail(f"{error.filename}: {error.strerror}")
        return 1
    except ValueError as error:
        output.fail(f"{folder}: {error}")
        return 1
    print(f"{folder}: ca.pem, and for {', '.join(PARTS)} a certificate NAME.pem with its key NAME-key.pem.")
    print("Each part gets ca.pem and its own two files:")
    print(f"  octavo worker --tls-ca {folder}/ca.pem --tls-cert {folder}/worker.pem", end=" ")
    print(f"--tls-key {folder}/worker-key.pem --mtls")
    print(f"ca-key.pem signs more of them: keep it where nobody else reads it (here: {folder}/ca-key.pem).")
    return 0


def _authority(kind: type[Authority], folder: Path) -> Authority:
    """Return the authority of the folder, a new one where there is none."""
    if (folder / "ca.pem").exists():
        return kind.load(folder)
    authority = kind.create()
    authority.save(folder)
    return authority
