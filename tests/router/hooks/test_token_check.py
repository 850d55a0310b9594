"""JSON Web Tokens as API keys: which are accepted, how their keys are read, and attacks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

from http_api.errors import RequestError
from router.hooks.key_check import KeyCheckError
from router.settings import JwtSettings

if TYPE_CHECKING:
    from router.hooks.token_check import TokenCheck

jwt = pytest.importorskip("jwt", reason="the extra jwt is not installed")

RSA, OTHER_RSA = (rsa.generate_private_key(65537, 2048) for _ in range(2))
CURVE, EDWARDS = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
ISSUER, AUDIENCE = "https://login.example", "kvrouter"
PEM = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def published(key: Any, key_id: str, **more: Any) -> dict[str, Any]:
    algorithms = jwt.algorithms
    kinds = {RSA.__class__: algorithms.RSAAlgorithm, CURVE.__class__: algorithms.ECAlgorithm}
    reader = kinds.get(type(key), algorithms.OKPAlgorithm)
    return json.loads(reader.to_jwk(key.public_key())) | {"kid": key_id} | more


KEYS = [published(RSA, "rsa"), published(CURVE, "curve", use="sig", alg="ES256")]


def claims(**changed: Any) -> dict[str, Any]:
    known = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "tenant": "gold"} | changed
    return {name: value for name, value in known.items() if value is not None}


def token(key: Any = RSA, algorithm: str = "RS256", key_id: str | None = "rsa", **changed: Any) -> str:
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims(**changed), key, algorithm, headers)


def unsigned(head: dict[str, Any]) -> str:
    """Return a token that is signed with HMAC by the public key, whatever its head states."""
    parts = [jwt.utils.base64url_encode(json.dumps(each).encode()) for each in (head, claims())]
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(b".".join(parts), PEM)
    return b".".join([*parts, jwt.utils.base64url_encode(signature)]).decode()


@dataclass
class Provider:
    answer: Any = field(default_factory=lambda: {"keys": list(KEYS)})
    status: int = 200
    asked: int = 0
    now: float = 0.0
    url: str = ""

    async def keys(self, _: web.Request) -> web.Response:
        self.asked += 1
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(text=text, status=self.status, headers={"location": "/other"})


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    known = Provider()
    app = web.Application()
    app.router.add_get("/keys", known.keys)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    known.url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
    yield known
    await runner.cleanup()


@pytest.fixture
async def check(provider: Provider) -> AsyncIterator[TokenCheck]:
    async with aiohttp.ClientSession() as session:
        made = check_of(provider, session)
        yield made
        await made.close()


def check_of(provider: Provider, session: aiohttp.ClientSession, **more: Any) -> TokenCheck:
    given = JwtSettings.model_validate({"jwks_url": provider.url, "issuer": ISSUER, "audience": AUDIENCE} | more)
    from router.hooks.token_check import TokenCheck

    return TokenCheck(given, session, 5.0, ["gold"], lambda: provider.now)


async def refused(check: TokenCheck, key: str) -> None:
    with pytest.raises(RequestError) as error:
        await check.check(key)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


async def test_signed_tokens_name_their_tenant_and_keys_are_read_once(provider: Provider, check: TokenCheck) -> None:
    good = [token(), token(CURVE, "ES256", "curve"), token(aud=["other", AUDIENCE]), token(exp=time.time() - 10)]
    assert await asyncio.gather(*map(check.check, good)) == ["gold"] * 4
    assert provider.asked == 1


@pytest.mark.parametrize(
    "key",
    [
        token(exp=time.time() - 120),
        token(exp=None),
        token(exp="soon"),
        token(nbf=time.time() + 120),
        token(iss="https://other.example"),
        token(iss=None),
        token(aud="other"),
        token(aud=None),
        token(tenant="silver"),
        token(tenant=None),
        token(tenant=["gold"]),
        token(OTHER_RSA),
        token(CURVE, "ES256"),  # with the id of another key
        token(RSA, "RS512"),
        token(key_id=None),
        token()[:-4],
        token() + "A" * 8192,
        jwt.encode(claims(), "", "none", {"kid": "rsa"}),
        unsigned({"alg": "HS256", "kid": "rsa"}),
        unsigned({"alg": "RS256", "kid": "rsa"}),
        unsigned({"alg": "RS256", "kid": ["rsa"]}),
        unsigned({"alg": ["RS256"], "kid": "rsa"}),
        unsigned({"alg": "RS256", "kid": "rsa", "jwk": KEYS[0]}),
        "a.b.c",
        "..",
        "sk-key",
        "",
    ],
)
async def test_other_tokens_are_refused(check: TokenCheck, key: str) -> None:
    await refused(check, key)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(), st.lists(st.binary().map(lambda part: jwt.utils.base64url_encode(part).decode())).map(".".join)
    )
)
async def test_any_text_is_refused(check: TokenCheck, key: str) -> None:
    await refused(check, key)


async def test_only_allowed_algorithms_and_public_keys_for_signatures_count(provider: Provider) -> None:
    secret = {"kty": "oct", "kid": "secret", "k": "c2VjcmV0" * 8, "alg": "HS256"}
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(OTHER_RSA)) | {"kid": "private"}
    odd = [{"kty": ["RSA"]}, {"kty": "RSA", "n": 1}, {}, published(OTHER_RSA, "encrypts", use="enc")]
    provider.answer = {"keys": [secret, private, *odd, published(EDWARDS, "ed")]}
    async with aiohttp.ClientSession() as session:
        check = check_of(provider, session, algorithms=["EdDSA", "RS256"])
        assert await check.check(token(EDWARDS, "EdDSA", "ed")) == "gold"
        await refused(check, token(OTHER_RSA, key_id="private"))
        await refused(check, token(OTHER_RSA, key_id="encrypts"))
        await refused(check, jwt.encode(claims(), "secret" * 8, "HS256", {"kid": "secret"}))


async def test_rotated_keys_are_read_once_for_a_flood_of_unknown_ids(provider: Provider, check: TokenCheck) -> None:
    assert await check.check(token()) == "gold"
    provider.answer = {"keys": [published(OTHER_RSA, "new")]}
    provider.now = 11.0
    assert await check.check(token(OTHER_RSA, key_id="new")) == "gold"
    await refused(check, token())  # its key is withdrawn
    for number in range(20):
        await refused(check, token(key_id=f"unknown {number}"))
    assert provider.asked == 2


async def test_keys_are_read_again_without_delay_and_outlive_an_outage(provider: Provider, check: TokenCheck) -> None:
    await check.check(token())
    provider.status = 500
    provider.now = 301.0
    assert await check.check(token()) == "gold"
    await until(lambda: provider.asked == 2)
    provider.now = 3599.0
    assert await check.check(token()) == "gold"
    await refused(check, token(key_id="unknown"))
    provider.now = 3601.0
    with pytest.raises(KeyCheckError, match="status 500"):
        await check.check(token())
    asked = provider.asked
    with pytest.raises(KeyCheckError, match="status 500"):  # It is not asked for each request.
        await check.check(token())
    assert provider.asked == asked


@pytest.mark.parametrize(
    ("answer", "status"), [("x", 200), ({"keys": []}, 200), ({"keys": [1]}, 200), (" " * 300_000, 200), ({}, 302)]
)
async def test_provider_without_keys_is_a_failure(
    provider: Provider, check: TokenCheck, answer: Any, status: int
) -> None:
    provider.answer, provider.status = answer, status
    with pytest.raises(KeyCheckError, match=r"hooks\.jwt\.jwks_url"):
        await check.check(token())
    assert provider.asked == 1
