"""What a service may be without: TLS, a secret, keys; and when it has to be told so."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from octavo._sdk.channel import parse_tls
from octavo.errors import InvalidRequestError
from octavo.gateway.config import GatewaySettings
from octavo.service.authority import Authority
from octavo.service.security import server_tls
from octavo.service.settings import ServiceSettings, SettingsError
from octavo.service.tls import Tls
from structlog.testing import capture_logs

from scheduler_svc.config import SchedulerSettings
from worker_svc.config import WorkerSettings

SERVICES: tuple[type[ServiceSettings], ...] = (SchedulerSettings, WorkerSettings, GatewaySettings)
FILES = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.5:1", "gpu-7:1"])
def test_plaintext_beyond_loopback_has_to_be_asked_for(listen: str, service: type[ServiceSettings]) -> None:
    with pytest.raises(SettingsError, match="insecure"):
        service.load({"listen": listen})
    service.load({"listen": listen, "insecure": True})
    service.load({"listen": listen, "mtls": True, **FILES})


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("listen", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_nothing(listen: str, service: type[ServiceSettings]) -> None:
    with capture_logs() as logs:
        settings = service.load({"listen": listen})
        assert server_tls(settings.server) is None  # type: ignore[attr-defined]
    assert logs == []


def test_plaintext_beyond_loopback_is_said_in_the_log() -> None:
    with capture_logs() as logs:
        server_tls(SchedulerSettings.load({"listen": "0.0.0.0:1", "insecure": True}).server)
    assert [(line["event"], line["log_level"]) for line in logs] == [("plaintext_beyond_loopback", "warning")]


def test_tls_alone_opens_no_worker_to_others() -> None:
    tls = {"listen": "0.0.0.0:1", **FILES}
    with pytest.raises(SettingsError, match="could command this worker"):
        WorkerSettings.load(tls)
    for enough in ({"worker_secret_file": "secret"}, {"mtls": True}, {"insecure": True}):
        WorkerSettings.load({**tls, **enough})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert": "cert.pem"}, "belong together"),
        ({"tls_key": "key.pem"}, "belong together"),
        ({"mtls": True}, "mtls needs"),
        ({"mtls": True, "tls_cert": "c", "tls_key": "k"}, "mtls needs"),
        ({"tls_cert": "/no/cert.pem", "tls_key": "/no/key.pem"}, "cannot be used.*/no/cert.pem"),
    ],
)
def test_what_cannot_work_is_said(given: Mapping[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        server_tls(SchedulerSettings.load(given).server)


def test_variables_without_a_service_in_their_name_count_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in FILES:
        monkeypatch.setenv(f"OCTAVO_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("OCTAVO_WORKER_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("OCTAVO_GATEWAY_TLS_CERT", "its-own.pem")
    scheduler, worker = SchedulerSettings.load({}), WorkerSettings.load({})
    assert worker.server.tls_ca == tmp_path / "tls_ca"
    assert worker.server.worker_secret_file == scheduler.fleet.worker_secret_file == tmp_path / "secret"
    assert SchedulerSettings.load({"tls_ca": "flag.pem"}).server.tls_ca == Path("flag.pem")
    assert GatewaySettings.load({}).server.tls_cert == Path("its-own.pem")


def test_files_of_a_client_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority.create()
    authority.save(tmp_path)
    for name in ("one", "two"):
        authority.issue(tmp_path, name, (), timedelta(days=1))
    (tmp_path / "text.pem").write_text("no certificate")
    ca, one, one_key, two_key, text, missing = (
        tmp_path / f"{name}.pem" for name in ("ca", "one", "one-key", "two-key", "text", "missing")
    )
    Tls(ca=ca, cert=one, key=one_key).check()
    for given, problem in (
        (Tls(ca=missing), "missing.pem: No such file"),
        (Tls(ca=text), "text.pem: not certificates"),
        (Tls(ca=ca, cert=one), "belong together"),
        (Tls(ca=ca, cert=one, key=two_key), "two-key.pem: not a certificate and its key"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            parse_tls(given)
