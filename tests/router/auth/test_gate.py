"""Tenants: what their keys open, what they have left, and how their caches are kept apart."""

from __future__ import annotations

import hashlib
import json

import pytest
from manual_clock import Clock

from http_api.errors import RequestError
from router.auth import Tenant, hashed_key
from router.auth.bodies import BodyCheck
from router.auth.routes import Routes
from router.settings import EngineFields, LimitSettings, TenantSettings

KEY = hashed_key("k")
CHAT = "/v1/chat/completions"


def tenant(clock: Clock, name: str = "a", isolate: bool = False, **limits: object) -> Tenant:
    return Tenant(name, TenantSettings.model_validate({"keys": [KEY], **limits}), isolate, clock)


def refused(tenant: Tenant, model: str | None = "m", tokens: int = 1) -> RequestError:
    with pytest.raises(RequestError) as refusal:
        tenant.admit(model, tokens)
    return refusal.value


def test_key_hash_is_sha256() -> None:
    assert hashed_key("é") == hashlib.sha256("é".encode()).hexdigest()


def test_without_limits_everything_is_let_through(clock: Clock) -> None:
    for _ in range(1000):
        tenant(clock).admit(None, 10**9)


def test_only_its_models_are_a_tenants(clock: Clock) -> None:
    limited = tenant(clock, models=["m", "n"])
    limited.admit("n", 1)
    for other in ("o", None):
        error = refused(limited, other)
        assert (error.status, error.param) == (403, "model")
        assert "m, n" in error.message


def test_an_adapter_beside_the_model_is_not_the_tenants(clock: Clock) -> None:
    check, route = BodyCheck(LimitSettings()), Routes().find("POST", CHAT)
    for adapter in ("sql", ["sql"], ""):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "lora_path": adapter}).encode()
        assert check.checked(route, b"", body, tenant(clock), EngineFields.REFUSE) == (body, body)
        with pytest.raises(RequestError) as refusal:
            check.checked(route, b"", body, tenant(clock, models=["m"]), EngineFields.REFUSE)
        assert (refusal.value.status, refusal.value.param) == (403, "lora_path")


def test_requests_a_second(clock: Clock) -> None:
    limited = tenant(clock, requests_per_second=3)
    for _ in range(3):
        limited.admit("m", 1)
    error = refused(limited)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 1)
    clock.now += 0.4
    limited.admit("m", 1)
    assert refused(limited).retry_after == 1
    slow = tenant(clock, requests_per_second=0.1)
    slow.admit("m", 1)
    assert refused(slow).retry_after == 10
    clock.now += 10
    slow.admit("m", 1)


def test_tokens_a_minute_count_prompts_and_answers(clock: Clock) -> None:
    limited = tenant(clock, tokens_per_minute=600)
    limited.admit("m", 400)
    limited.spend(300)
    assert refused(limited).retry_after == 11
    clock.now += 11
    limited.admit("m", 10_000)  # larger than a minute's: it waits for its debt afterwards
    assert refused(limited).retry_after == 1000


def test_refused_request_is_not_charged(clock: Clock) -> None:
    limited = tenant(clock, requests_per_second=1, tokens_per_minute=60)
    limited.admit("m", 50)
    for _ in range(100):
        refused(limited)
    clock.now += 1
    limited.admit("m", 10)
    clock.now += 1
    for _ in range(100):
        limited.admit("m", 0)
        clock.now += 1


def test_tenants_never_share_a_salt(clock: Clock) -> None:
    tenants = tenant(clock, "a", isolate=True), tenant(clock, "b", isolate=True)
    bodies = [b'{"prompt": 1}', b'{"prompt": 1, "cache_salt": "x"}', b'{"prompt": 1, "cache_salt": "y"}']
    salts = [json.loads(each.with_tenant_salt(CHAT, body))["cache_salt"] for each in tenants for body in bodies]
    assert len(set(salts)) == 6
    stolen = json.dumps({"prompt": 1, "cache_salt": salts[0]}).encode()
    assert json.loads(tenants[1].with_tenant_salt(CHAT, stolen))["cache_salt"] not in salts
    assert salts == [json.loads(each.with_tenant_salt(CHAT, body))["cache_salt"] for each in tenants for body in bodies]


def test_only_the_salt_of_an_object_is_changed_and_only_when_wanted(clock: Clock) -> None:
    body = b'{ "prompt": "\\u00e9",\n"x": 1.0 }'
    apart = tenant(clock, isolate=True)
    assert apart.with_tenant_salt(CHAT, body).startswith(body[:-2] + b',"cache_salt":"')
    assert apart.with_tenant_salt("/v1/embeddings", body) == body
    assert tenant(clock).with_tenant_salt(CHAT, body) == body
    with pytest.raises(RequestError, match="Send one JSON object, in UTF-8"):
        tenant(clock, isolate=True).with_tenant_salt(CHAT, b"[]")
