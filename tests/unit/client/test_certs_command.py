"""`octavo certs`: certificates that fit together, and that can be made again."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from octavo.cli.main import main
from octavo.service.server_tls import ServerTls
from octavo.service.tls import Tls


def test_certificates_are_made_and_made_again_by_the_same_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", "--out", str(folder), "--host", "10.0.0.5", "--host", "gpu-7.example"]) == 0
    assert "--mtls" in capsys.readouterr().out
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes["ca-key.pem"] == modes["worker-key.pem"] == 0o600
    authority, worker = (folder / "ca.pem").read_bytes(), (folder / "worker.pem").read_bytes()
    assert main(["certs", "--out", str(folder)]) == 0
    assert (folder / "ca.pem").read_bytes() == authority
    assert (folder / "worker.pem").read_bytes() != worker


def test_certificate_is_of_its_part_and_of_the_hosts(tmp_path: Path) -> None:
    main(["certs", "--out", str(tmp_path), "--host", "10.0.0.5", "--host", "gpu-7.example"])
    server = ServerTls(
        tmp_path / "worker.pem", tmp_path / "worker-key.pem", tmp_path / "ca.pem"
    ).ssl_context()
    client = Tls(
        ca=tmp_path / "ca.pem", cert=tmp_path / "client.pem", key=tmp_path / "client-key.pem"
    ).ssl_context()
    for host in ("worker", "localhost", "127.0.0.1", "::1", "10.0.0.5", "gpu-7.example"):
        assert shake_hands(client, server, host) is None
    assert "verify failed" in str(shake_hands(client, server, "elsewhere"))


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> Exception | None:
    """Let a client and a server meet in memory; return what the client thinks is wrong."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        try:
            ours.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            return error
        with suppress(ssl.SSLWantReadError):
            theirs.do_handshake()
    return None
