"""Tenants: what their keys open, what they have left, and how their caches are kept apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "a"}]}]),
        ("input", [{"type": "function_call_output", "output": [{"type": "input_image", "uuid": "a"}]}]),
        ("text_2", {"content": [{"type": "image_url", "uuid": "a"}]}),
        ("messages", [{"role": "tool", "content": [{"content": [{"type": "input_audio", "uuid": "a"}]}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "uuid": "a"}]}]),
        ("input", [{"type": "input_image", "image_url": "x", "uuid": "a"}]),
    ],
)
@pytest.mark.parametrize("escaped", [False, True])
def test_tenants_never_share_the_name_of_a_media_item(clock: Clock, field: str, value: Any, escaped: bool) -> None:
    one, other = (tenant(clock, isolate=True, name=name) for name in ("a", "b"))
    body = json.dumps({"model": "m", field: value, "n": 1}).encode()
    sent = body.replace(b'"uuid"', b'"\\u0075uid"') if escaped else body
    names = {tuple(media_names(json.loads(each.with_tenant_salt(CHAT, sent))[field])) for each in (one, other)}
    assert len(names) == 2
    assert all(len(name) == 1 and len(name[0]) == 64 for name in names)
    assert one.with_tenant_salt(CHAT, sent) == one.with_tenant_salt(CHAT, sent)
    (name,) = media_names(json.loads(one.with_tenant_salt(CHAT, sent))[field])
    stolen = body.replace(b'"uuid": "a"', b'"uuid": "%b"' % name.encode())
    assert name not in media_names(json.loads(other.with_tenant_salt(CHAT, stolen))[field])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/v1/responses"])
def test_media_names_of_isolated_tenants_are_their_own_on_every_path(clock: Clock, path: str) -> None:
    route, check = Routes().find("POST", path), BodyCheck(LimitSettings())
    image = {"type": "image_url", "image_url": {"url": "x"}, "uuid": "a"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    isolated, other = tenant(clock, isolate=True), tenant(clock)
    sent, _ = check.checked(route, b"", body, isolated, EngineFields.REFUSE)
    assert media_names(json.loads(sent)) != ["a"]
    assert check.checked(route, b"", body, other, EngineFields.REFUSE)[0] == body


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"session_params": {"id": "s", "rid": "r"}}, "session_params"),
        ({"nvext": {"cache_salt": "x"}}, "nvext.cache_salt"),
        (
            {"sampling_params": [{"custom_params": {"session_params": {}}}]},
            "sampling_params.custom_params.session_params",
        ),
        ({"extra_body": {"extra_key": "x"}}, "extra_body.extra_key"),
    ],
)
def test_isolated_tenants_cannot_name_what_others_have_cached(clock: Clock, fields: dict[str, Any], name: str) -> None:
    route, check = Routes().find("POST", CHAT), BodyCheck(LimitSettings())
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    with pytest.raises(RequestError) as refusal:
        check.checked(route, b"", body, tenant(clock, isolate=True), EngineFields.REFUSE)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, name, "not_isolated")
    assert check.checked(route, b"", body, tenant(clock), EngineFields.REFUSE) == (body, body)


def test_extra_key_follows_a_salt_of_one_length(clock: Clock) -> None:
    # SGLang finds blocks by `cache_salt` + `extra_key`, so salts of several lengths could make two tenants equal.
    for name, salt in (("a", ""), ("b", "x" * 100)):
        body = json.dumps({"prompt": "x", "cache_salt": salt, "extra_key": "e"}).encode()
        sent = json.loads(tenant(clock, name, isolate=True).with_tenant_salt("/v1/completions", body))
        assert (len(sent["cache_salt"]), sent["extra_key"]) == (64, "e")


def test_header_that_counts_more_than_the_salt_is_not_forwarded(clock: Clock) -> None:
    headers = [(b"x-tenant-id", b"b"), (b"x_tenant_id", b"b"), (b"x-tenant", b"b")]
    assert tenant(clock, isolate=True).headers_for_workers(headers) == headers[2:]
    assert tenant(clock).headers_for_workers(headers) == headers


@pytest.mark.parametrize(
    "name", ["mm_hashes", "nvext.backend_instance_id", "nvext.prefill_dp_rank", "ec_transfer_params"]
)
def test_fields_that_name_cached_media_or_workers_are_engine_control(name: str) -> None:
    outer, _, inner = name.partition(".")
    body = json.dumps({"model": "m", "prompt": "x", outer: {inner: 1} if inner else 1}).encode()
    route = Routes().find("POST", "/v1/completions")
    with pytest.raises(RequestError) as refusal:
        BodyCheck(LimitSettings()).checked(route, b"", body, None, EngineFields.REFUSE)
    assert (refusal.value.param, refusal.value.code) == (name, "engine_field")


def media_names(value: Any) -> list[str]:
    """Return every `uuid` in a value."""
    if isinstance(value, list):
        return [name for each in value for name in media_names(each)]
    if not isinstance(value, dict):
        return []
    return [each for key, each in value.items() if key == "uuid"] + [
        name for each in value.values() for name in media_names(each)
    ]


def test_arguments_of_tools_keep_their_uuid(clock: Clock) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"uuid": "a"}}}], "content": "x"}]
    body = json.dumps({"messages": messages}).encode()
    assert json.loads(tenant(clock, isolate=True).with_tenant_salt(CHAT, body))["messages"] == messages


def test_only_the_salt_of_an_object_is_changed_and_only_when_wanted(clock: Clock) -> None:
    body = b'{ "prompt": "\\u00e9",\n"x": 1.0 }'
    apart = tenant(clock, isolate=True)
    assert apart.with_tenant_salt(CHAT, body).startswith(body[:-2] + b',"cache_salt":"')
    assert apart.with_tenant_salt("/v1/embeddings", body) == body
    assert tenant(clock).with_tenant_salt(CHAT, body) == body
    with pytest.raises(RequestError, match="Send one JSON object, in UTF-8"):
        tenant(clock, isolate=True).with_tenant_salt(CHAT, b"[]")
