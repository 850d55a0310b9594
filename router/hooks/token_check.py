"""The check of JSON Web Tokens as API keys (`hooks.jwt`), by the keys that an identity provider publishes (JWKS).

A claim of a token names its tenant. A token is accepted if

- one of the provider's keys signed it with an allowed algorithm,
- its issuer and audience are those of the settings,
- it has not expired.

How the keys stay current:

- Keys are read again every `_FRESH` seconds. If that fails, the known ones count for `_LONGEST` seconds.
- A token with an unknown key id has them read again, at most every `_UNKNOWN` seconds: providers rotate keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import jwt
import msgspec
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from kvevents.decoding import read_json
from router.auth.tenants import unknown_key
from router.hooks.key_check import KeyCheckError
from router.http.client import connection_problem, read_answer
from router.http.event_loop import SharedCalls
from router.settings import JwtSettings

_FRESH: Final = 300.0
_LONGEST: Final = 3600.0
_UNKNOWN: Final = 10.0
# Seconds between two attempts while no keys are known.
_RETRY: Final = 1.0
_MOST_KEYS: Final = 64
_MOST_BYTES: Final = 256 * 1024
_LONGEST_TOKEN: Final = 8 * 1024
# The id of a key and of a token without one.
_NO_ID: Final = ""
# Key types of public keys, how the names of their algorithms begin, and their readers. Symmetric keys are never used.
_TYPES: Final[dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]]]] = {
    "RSA": (("RS", "PS"), RSAAlgorithm.from_jwk),
    "EC": (("ES",), ECAlgorithm.from_jwk),
    "OKP": (("EdDSA",), OKPAlgorithm.from_jwk),
}
_INVALID: Final = (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _PublicKey:
    """A key of the provider. `families`: how its algorithms' names begin. `algorithm`: its only one, if stated."""

    key: Any
    families: tuple[str, ...]
    algorithm: str | None


class TokenCheck:
    """The check.

    - `timeout`: seconds for the provider's answer. Concurrent requests read its keys once.
    - `tenants`: the names of the settings' tenants. With tenants, a token has to name one.
    """

    name = "jwt"

    def __init__(
        self,
        settings: JwtSettings,
        session: aiohttp.ClientSession,
        timeout: float,
        tenants: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._url = str(settings.jwks_url)
        self._session = session
        self._timeout = aiohttp.ClientTimeout(timeout)
        self._tenants = frozenset(tenants)
        self._clock = clock
        self._keys: dict[str, _PublicKey] = {}
        self._read_at = float("-inf")
        self._tried_at = float("-inf")
        self._problem = ""
        self._reading = SharedCalls[None]()

    async def check(self, key: str) -> str:
        """Return the tenant of an accepted token; "" without tenants. Raises RequestError (401) and KeyCheckError."""
        if not 0 < len(key) <= _LONGEST_TOKEN:
            raise unknown_key()
        try:
            head = jwt.get_unverified_header(key)
        except _INVALID as error:
            raise unknown_key() from error
        algorithm, key_id = head.get("alg"), head.get("kid", _NO_ID)
        if algorithm not in self._settings.algorithms or not isinstance(key_id, str):
            raise unknown_key()
        public = await self._public_key(key_id)
        # A public key never serves as the secret of a symmetric algorithm.
        if public is None or not algorithm.startswith(public.families) or public.algorithm not in (None, algorithm):
            raise unknown_key()
        return self._tenant(self._claims(key, public, algorithm))

    async def close(self) -> None:
        """Cancel all questions."""
        await self._reading.close()

    def _claims(self, token: str, public: _PublicKey, algorithm: str) -> dict[str, Any]:
        settings = self._settings
        try:
            return jwt.decode(
                token,
                public.key,
                algorithms=[algorithm],
                issuer=settings.issuer,
                audience=settings.audience,
                leeway=settings.leeway,
                options={"require": ["exp", "iss", "aud"]},
            )
        except _INVALID as error:
            raise unknown_key() from error

    def _tenant(self, claims: dict[str, Any]) -> str:
        if not self._tenants:
            return ""
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or tenant not in self._tenants:
            raise unknown_key()
        return tenant

    async def _public_key(self, key_id: str) -> _PublicKey | None:
        """Return the provider's key with an id; None if it has none. Raises KeyCheckError if no keys are known."""
        now = self._clock()
        age, since = now - self._read_at, now - self._tried_at
        reads = self._url in self._reading
        if age >= _LONGEST:
            if not reads and since < _RETRY:
                raise KeyCheckError(self._problem)
            await self._read_shared()
        elif key_id not in self._keys and (reads or since >= _UNKNOWN):
            try:
                await self._read_shared()
            except KeyCheckError:  # The known keys count.
                return None
        elif age >= _FRESH and since >= _UNKNOWN:
            self._reading.start(self._url, self._read)
        return self._keys.get(key_id)

    async def _read_shared(self) -> None:
        await asyncio.shield(self._reading.start(self._url, self._read))

    async def _read(self) -> None:
        """Read the provider's keys. Raises KeyCheckError."""
        self._tried_at = self._clock()
        try:
            self._keys = await self._answer()
        except (msgspec.DecodeError, ValueError) as error:
            self._problem = f"hooks.jwt.jwks_url answers no usable keys: {error}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._problem = f"hooks.jwt.jwks_url {connection_problem(error)}"
        else:
            self._read_at = self._clock()
            return
        raise KeyCheckError(self._problem)

    async def _answer(self) -> dict[str, _PublicKey]:
        async with self._session.get(self._url, timeout=self._timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            given = read_json(await read_answer(response, _MOST_BYTES), _KeySet).keys
        found: dict[str, _PublicKey] = {}
        for each in given[:_MOST_KEYS]:
            key_id, public = each.get("kid", _NO_ID), _public_key(each)
            if isinstance(key_id, str) and public is not None:
                found.setdefault(key_id, public)
        if not found:
            raise ValueError("it has no public key for signatures")
        return found


def _public_key(given: dict[str, Any]) -> _PublicKey | None:
    """Return a published key; None if it is not a public key for signatures."""
    kind = given.get("kty")
    if not isinstance(kind, str) or kind not in _TYPES or "d" in given or given.get("use", "sig") != "sig":
        return None
    families, reader = _TYPES[kind]
    try:
        return _PublicKey(reader(given), families, given.get("alg"))
    except _INVALID:
        return None
