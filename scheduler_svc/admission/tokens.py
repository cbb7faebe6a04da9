"""Tokens of an identity provider (JWT) as keys: whom they are good for, without asking anybody at a call."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import structlog
from octavo.keys import Key, Role, Tenant
from octavo.service.followed import Followed

_log = structlog.get_logger()

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Those with a public key: who checks a token cannot make one."""
_URLS: Final = ("https://", "http://127.0.0.1:", "http://localhost:")
_FETCH_EVERY_S: Final = 300.0
_TRY_AGAIN_S: Final = 5.0
_FETCH_TIMEOUT_S: Final = 10.0
_MAX_JWKS_BYTES: Final = 1 << 20
_MAX_TOKEN: Final = 4096
_MAX_REMEMBERED: Final = 4096


class TokenSettings(Protocol):
    """What is set of tokens."""

    jwt_issuer: str | None
    jwt_audience: str | None
    jwt_jwks: str | None
    jwt_tenant_claim: str


class TokenSettingsError(Exception):
    """Tokens cannot be checked as it is set; the message says what is missing."""


class Tokens:
    """Checks tokens by the keys of their issuer, which are followed in a file or fetched beside the calls."""

    def __init__(self, settings: TokenSettings) -> None:
        """Raises TokenSettingsError."""
        given = (settings.jwt_issuer, settings.jwt_audience, settings.jwt_jwks)
        if None in given:
            raise TokenSettingsError("jwt_issuer, jwt_audience and jwt_jwks belong together: set all three")
        try:
            import jwt  # noqa: PLC0415 - needs an extra
        except ModuleNotFoundError:
            raise TokenSettingsError("tokens need pyjwt: pip install 'octavo[jwt]'") from None
        self._jwt = jwt
        self._issuer, self._audience, source = map(str, given)
        self._claim = settings.jwt_tenant_claim
        self._known: OrderedDict[str, tuple[Mapping[str, Any], float]] = OrderedDict()
        """Claims of tokens that were found good, and until when they are."""
        self._keys: Mapping[str | None, Any] = {}
        self._url = source if source.startswith(_URLS) else None
        self._file: Followed[bytes] | None = None
        if self._url is None:
            try:
                self._file = Followed([Path(source)], lambda contents: contents[0])
                self._seen = self._file.get()
                self._use(self._seen)
            except (OSError, ValueError) as error:
                raise TokenSettingsError(f"jwt_jwks cannot be used: {error}") from None

    def find(self, token: str, tenants: Mapping[str, Tenant]) -> Key | None:
        """Return a token as a key of the tenant that it names, None when it is not good or names none."""
        if token.count(".") != 2 or len(token) > _MAX_TOKEN:
            return None
        self._follow()
        claims = self._claims(token)
        tenant = tenants.get(str(claims.get(self._claim))) if claims is not None else None
        if claims is None or tenant is None:
            return None
        return Key(f"jwt:{claims.get('sub', '')!s:.64}", b"", tenant, frozenset({Role.INFERENCE}))

    async def run(self) -> NoReturn:
        """Fetch the keys of the issuer again and again, where they are at a URL."""
        while True:
            pause_s = _FETCH_EVERY_S
            if self._url is not None:
                try:
                    self._use(await asyncio.to_thread(self._fetch, self._url))
                except Exception as error:  # noqa: BLE001 - told, and tried again; the last keys stay in force
                    _log.error("jwks_not_fetched", url=self._url, problem=str(error))
                    pause_s = _TRY_AGAIN_S
            await asyncio.sleep(pause_s)

    def _claims(self, token: str) -> Mapping[str, Any] | None:
        known = self._known.get(token)
        if known is None:
            try:
                kid = self._jwt.get_unverified_header(token).get("kid")
                key = self._keys.get(kid)
                if key is None:
                    return None
                claims: Mapping[str, Any] = self._jwt.decode(
                    token,
                    key,
                    algorithms=ALGORITHMS,
                    issuer=self._issuer,
                    audience=self._audience,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except self._jwt.PyJWTError:
                return None
            self._known[token] = known = claims, float(claims["exp"])
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        claims, expires_at = known
        return claims if time.time() < expires_at else None

    def _follow(self) -> None:
        """Take in the file, if it has changed."""
        if self._file is None or (content := self._file.get()) is self._seen:
            return
        self._seen = content
        try:
            self._use(content)
        except ValueError as error:
            _log.error("jwks_broken", problem=str(error), in_force="the last one that was right")

    def _use(self, content: bytes) -> None:
        """Check by these keys from now on; raises ValueError when they are none."""
        try:
            found = self._jwt.PyJWKSet.from_dict(json.loads(content)).keys
        except (self._jwt.PyJWTError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"it is no JWKS: {error}") from None
        keys = {one.key_id: one for one in found if one.algorithm_name in ALGORITHMS}
        if keys.keys() != self._keys.keys():
            _log.info("jwks_loaded", keys=len(keys))
        self._keys = keys
        self._known.clear()

    @staticmethod
    def _fetch(url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:  # noqa: S310 - http(s) only
            content: bytes = answer.read(_MAX_JWKS_BYTES + 1)
        if len(content) > _MAX_JWKS_BYTES:
            raise ValueError(f"it has more than {_MAX_JWKS_BYTES} bytes")
        return content
