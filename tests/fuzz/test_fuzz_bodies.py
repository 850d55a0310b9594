"""Generated JSON bodies: what the router accepts, a strict decoder reads as the same."""

from __future__ import annotations

from typing import Any

import msgspec
from budget import SEED, examples
from differential import strict_json
from generated_requests import json_body

from http_api.errors import RequestError
from router.apis.json_edit import LONG
from router.auth.bodies import BodyCheck, read_object
from router.auth.engine_fields import control_fields
from router.auth.routes import Routes
from router.settings import EngineFields, LimitSettings

FEW = 5000
ROUTE = Routes().find("POST", "/v1/completions")


def test_accepted_bodies_have_one_meaning() -> None:
    limits = LimitSettings()
    check = BodyCheck(limits)
    count, accepted, plain = 0, 0, 0
    for random in examples(FEW):
        body = json_body(random)
        count += 1
        try:
            fields = read_object(body, limits.values)
        except RequestError:
            fields = None
        if random.random() < 0.05:
            check_long(body, fields, limits)
        if fields is None:
            assert check.model_body(body) is None, body
            continue
        if check.model_body(body) is not None:
            plain += 1
            assert control_fields(fields) == [], body
            assert "priority" not in fields, body
        accepted += 1
        assert strict_json(body) == fields, body
        without_control_fields, _ = check.checked(ROUTE, b"", body, None, EngineFields.STRIP)
        read = strict_json(without_control_fields)
        assert control_fields(read) == [], body
        kept = {name for name in fields if not control_fields({name: fields[name]})}
        assert all(read[name] == fields[name] for name in kept), body
        if not control_fields(fields):
            assert without_control_fields is body
            assert check.checked(ROUTE, b"", body, None, EngineFields.REFUSE)[0] is body
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert accepted > count / 10
    print(f"seed {SEED}: {count} bodies, {accepted} accepted, {plain} of these plain")


def check_long(body: bytes, fields: dict[str, Any] | None, limits: LimitSettings) -> None:
    """Assert that a long version of the body, which another parser reads, is accepted or refused alike."""
    start = body.find(b"{") + 1
    try:
        read = read_object(body[:start] + b'"":"%b",' % (b"x" * LONG) + body[start:], limits.values)
    except RequestError:
        assert fields is None or body.strip().endswith(b"{}"), body
    else:
        assert fields is not None, body
        assert fields.keys() == read.keys() - {""}, body
