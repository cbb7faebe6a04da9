"""A stack of real processes with mTLS on all hops and keys, and whoever may or may not come in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from octavo.keys import hash_of, new_key
from octavo.service.authority import Authority
from octavo.service.private import write_private
from octavo.service.tls import Tls
from octavo.stack import Stack, StackConfig, free_ports

SIM = ("--runner", "sim")
PARTS = ("scheduler", "worker", "gateway", "client")
YEAR = timedelta(days=365)
HOSTS = ("localhost", "127.0.0.1")
ROLES = {
    "user": ["inference"],
    "other": ["inference"],
    "boss": ["operator"],
    "watcher": ["metrics"],
    "gateway": ["forward"],
    "former": ["inference", "operator"],
}
"""Keys by their ids, each of a tenant of its own."""


@dataclass
class Secured:
    """Where the files of a stack lie, and its keys."""

    folder: Path
    stack: Stack
    keys: dict[str, str]
    metrics_ports: Mapping[str, int] = field(default_factory=dict)

    def tls(self, name: str = "client") -> Tls:
        """The files of a certificate of the stack's own authority."""
        return tls_of(self.folder, name)

    @property
    def ports(self) -> dict[str, str]:
        """The gRPC ports by name."""
        return {"scheduler": self.stack.endpoint, "worker": self.stack.workers[0].address}

    def channel(self, address: str, name: str | None = "client", authority: str = "") -> grpc.aio.Channel:
        """A channel that presents a certificate, of another authority's folder where one is named."""
        files = self.tls().read()
        shown = tls_of(self.folder / authority, name).read() if name is not None else None
        credentials = grpc.ssl_channel_credentials(
            files.ca, shown.key if shown else None, shown.cert if shown else None
        )
        return grpc.aio.secure_channel(address, credentials)


def tls_of(folder: Path, name: str) -> Tls:
    return Tls(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}-key.pem")


def write_keys(path: Path, keys: Mapping[str, str], *ids: str) -> None:
    text = "".join(f"[tenants.{name}]\n" for name in ids)
    for name in ids:
        text += f'[[keys]]\nid = "{name}"\nhash = "{hash_of(keys[name])}"\ntenant = "{name}"\n'
        text += f"roles = {ROLES[name]}\n"
    write_private(path, text)


def make_certificates(folder: Path) -> Authority:
    """Certificates of the parts, and beside them those of another authority, and one that has expired."""
    authority, other = Authority.create(), Authority.create("another authority")
    (folder / "other").mkdir(exist_ok=True)
    authority.save(folder)
    other.save(folder / "other")
    for part in PARTS:
        authority.issue(folder, part, () if part == "client" else HOSTS, YEAR)
    for part in ("client", "scheduler"):
        other.issue(folder / "other", part, HOSTS, YEAR)
    authority.issue(folder, "expired", HOSTS, timedelta(days=-1))
    return authority


@contextmanager
def secured(folder: Path, *, num_workers: int = 1, worker_args: tuple[str, ...] = SIM) -> Iterator[Secured]:
    """Start a stack, and leave its client's files and an operator's key in the environment."""
    make_certificates(folder)
    keys = {name: new_key() for name in ROLES}
    write_keys(folder / "keys.toml", keys, *[name for name in ROLES if name != "former"])
    write_private(folder / "gateway.key", keys["gateway"])
    ports = dict(zip(("scheduler", "worker"), free_ports(2), strict=True))
    metrics = {part: ("--metrics-port", str(port)) for part, port in ports.items()}
    config = StackConfig(
        model="sim",
        num_workers=num_workers,
        worker_args=(*worker_args, *metrics["worker"]) if num_workers == 1 else worker_args,
        scheduler_args=("--no-overload-control", *metrics["scheduler"]),
        gateway_port=0,
        gateway_args=("--api-key-file", str(folder / "gateway.key")),
        folder=folder / "logs",
        certs=folder,
        env={"OCTAVO_KEY_FILE": str(folder / "keys.toml")},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_API_KEY", keys["boss"])
        with Stack(config) as stack:
            stack.wait_ready(120)
            yield Secured(folder, stack, keys, ports)
