"""Tokens of an issuer: which are good, for whom, and what happens when its keys change."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from octavo.keys import KeyFile, Role
from octavo.service.private import write_private

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.tokens import Tokens, TokenSettingsError
from scheduler_svc.errors import ServiceError
from scheduler_svc.observe.metrics import SchedulerMetrics
from tests.e2e.scheduler_stack import until

TENANTS = KeyFile.parse("[tenants.acme]\n[tenants.other]\n")
ISSUER, AUDIENCE = "https://login.example", "octavo"


@dataclass
class Settings:
    jwt_issuer: str | None
    jwt_audience: str | None
    jwt_jwks: str | None
    jwt_tenant_claim: str = "tenant"


class Issuer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rotate("one")

    def rotate(self, kid: str) -> None:
        self.kid = kid
        self.key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        write_private(self.path, json.dumps({"keys": [{**public, "kid": kid, "alg": "ES256"}]}))

    def token(self, key: Any = None, algorithm: str = "ES256", **claims: Any) -> str:
        given = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "anna", "tenant": "acme"}
        kept = {name: value for name, value in {**given, **claims}.items() if value is not None}
        return jwt.encode(kept, key or self.key, algorithm, {"kid": self.kid})


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


def unsigned(issuer: Issuer) -> str:
    _, body, _ = issuer.token().split(".")
    claims_nothing = json.dumps({"alg": "none", "kid": "one"}).encode()
    return f"{base64.urlsafe_b64encode(claims_nothing).decode().rstrip('=')}.{body}."


def tokens_of(issuer: Issuer) -> Tokens:
    return Tokens(Settings(ISSUER, AUDIENCE, str(issuer.path)))


def test_token_is_a_key_of_its_tenant_for_requests_alone(issuer: Issuer) -> None:
    access = Access(SchedulerMetrics())
    access.key_file, access.tokens = TENANTS, tokens_of(issuer)
    token = issuer.token()
    assert access.authenticate(token).name == "acme"
    assert access.authenticate(token).name == "acme"
    assert access.id_of(token) == "jwt:anna"
    with pytest.raises(ServiceError, match="role operator"):
        access.authenticate(token, Role.OPERATOR)


def test_token_that_is_not_good_is_no_key(issuer: Issuer) -> None:
    stranger = ec.generate_private_key(ec.SECP256R1())
    bad = {
        "expired": issuer.token(exp=time.time() - 1),
        "without an end": issuer.token(exp=None),
        "of another issuer": issuer.token(iss="https://elsewhere.example"),
        "for somebody else": issuer.token(aud="another"),
        "for nobody": issuer.token(aud=None),
        "not valid yet": issuer.token(nbf=time.time() + 60),
        "of an unknown tenant": issuer.token(tenant="nobody"),
        "of no tenant": issuer.token(tenant=None),
        "signed by another key": issuer.token(stranger),
        "signed with what is public": issuer.token("x" * 64, "HS256"),
        "not signed": unsigned(issuer),
        "changed": issuer.token()[:-4] + "AAAA",
        "no token": "a.b.c",
        "too long": issuer.token(more="x" * 8000),
    }
    tokens = tokens_of(issuer)
    assert tokens.find(issuer.token(), TENANTS.tenants) is not None
    assert [why for why, token in bad.items() if tokens.find(token, TENANTS.tenants) is not None] == []


def test_token_that_was_good_ends_with_its_time_and_with_its_key(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(issuer)
    short, long = issuer.token(), issuer.token(exp=time.time() + 1000)
    assert all(tokens.find(one, TENANTS.tenants) for one in (short, long))
    later = time.time() + 120
    monkeypatch.setattr(time, "time", lambda: later)
    assert [tokens.find(one, TENANTS.tenants) is not None for one in (short, long)] == [False, True]
    monkeypatch.undo()
    issuer.rotate("two")
    assert tokens.find(long, TENANTS.tenants) is None
    assert tokens.find(issuer.token(), TENANTS.tenants) is not None
    issuer.path.write_text("no JWKS")
    assert tokens.find(issuer.token(), TENANTS.tenants) is not None


@pytest.mark.parametrize(
    "settings",
    [
        Settings(ISSUER, None, "jwks.json"),
        Settings(None, AUDIENCE, "jwks.json"),
        Settings(ISSUER, AUDIENCE, None),
        Settings(ISSUER, AUDIENCE, "/no/jwks.json"),
        Settings(ISSUER, AUDIENCE, "http://elsewhere.example/jwks.json"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Settings) -> None:
    with pytest.raises(TokenSettingsError):
        Tokens(settings)


async def test_keys_of_an_issuer_are_fetched_from_a_url(issuer: Issuer) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=issuer.path.parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/{issuer.path.name}"
    tokens = Tokens(Settings(ISSUER, AUDIENCE, url))
    assert tokens.find(issuer.token(), TENANTS.tenants) is None
    fetching = asyncio.create_task(tokens.run())
    try:
        await until(lambda: tokens.find(issuer.token(), TENANTS.tenants) is not None)
    finally:
        fetching.cancel()
        server.shutdown()
        server.server_close()
