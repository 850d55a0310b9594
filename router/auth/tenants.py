"""Tenants: their API keys, and the permissions and rates of each key.

A tenant's key opens the inference endpoints and `proxy.more_routes`, for its models and at its rates. If tenants exist,
all other endpoints require the operator's token, because cached prefixes reveal what others asked. Only liveness,
readiness, metrics and the empty live page stay open.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping
from secrets import compare_digest
from typing import Any, Final

import msgspec

from http_api.errors import RequestError
from kvevents.decoding import read_json
from router.apis.body_fields import MediaFields
from router.apis.json_edit import SpliceError, field, with_field
from router.apis.media_parts import parts_in
from router.auth.engine_fields import control_fields
from router.auth.routes import Access, Route
from router.http.headers import Headers
from router.settings import HookSettings, TenantSettings, TenantsSettings

_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
# The field of a media item that names it in an engine's cache, and how a body with it looks, escaped or not.
_MEDIA_NAME = "uuid"
_MEDIA_NAME_MARKS = (b'"uuid"', b"\\u")
# Fields by which engines find what is cached, whatever the salt: SGLang's open sessions, and inside `nvext` Dynamo's
# salt, which counts more than the body's.
NAMES_OF_CACHED = frozenset({"session_params"})
_NAMES_OF_CACHED_INSIDE = NAMES_OF_CACHED | {"cache_salt", "extra_key"}
_DYNAMO_SALT_HEADER = b"x-tenant-id"  # counts more than any salt of a body
# The salt is sent on these paths if `tenants.salted_messages` says that the engines read it.
_MESSAGES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_WITHOUT_CACHE = frozenset({"/v1/models", "/v1/embeddings"})
# Browsers cannot set headers of WebSockets. OpenAI's clients send the key as a subprotocol with this beginning.
KEY_SUBPROTOCOL: Final = b"openai-insecure-api-key."
_KEY_SUBPROTOCOL: Final = re.compile(rb"(?:^|,)\s*" + re.escape(KEY_SUBPROTOCOL) + rb"([^,\s]+)")
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
# SGLang's field for an adapter beside `model`: one name, or one for each prompt.
ADAPTER = "lora_path"


def hashed_key(key: str) -> str:
    """Return an API key's hash, in the form of the settings."""
    return hashlib.sha256(key.encode()).hexdigest()


class Bucket:
    """A token bucket that fills with `rate` per second up to `seconds` worth of it, and can go into debt."""

    def __init__(self, rate: float, seconds: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._most = max(rate * seconds, 1.0)
        self._clock = clock
        self._level = self._most
        self._at = clock()

    def wait(self) -> float:
        """Return the seconds until one unit is available; 0 if there is one."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(1.0 - self._level, 0.0) / self._rate

    def charge(self, amount: float) -> None:
        """Take an amount from the bucket."""
        self._level -= amount


class Tenant:
    """A tenant, with its permissions and what is left of its rates."""

    def __init__(
        self,
        name: str,
        settings: TenantSettings,
        isolate: bool,
        clock: Callable[[], float] = time.monotonic,
        aliases: Mapping[str, str] = {},
    ) -> None:
        """Create a tenant. `isolate`: no other tenant shares its cached prefixes. `aliases`: models by alias."""
        self.name = name
        self.on_spent: Callable[[str, int, int], None] = lambda *_: None
        self.priority = settings.priority
        self._models = settings.models and [aliases.get(model, model) for model in settings.models]
        self._isolate = isolate
        requests, tokens = settings.requests_per_second, settings.tokens_per_minute
        self._requests = Bucket(requests, 1.0, clock) if requests else None
        self._tokens = Bucket(tokens / 60, 60.0, clock) if tokens else None

    def with_tenant_salt(self, path: str, body: bytes) -> bytes:
        """Return a body whose cached prefix no other tenant shares. Raises RequestError (400) for invalid JSON."""
        if not self._isolate:
            return body
        try:
            body = self._with_media_names(body)
            if path not in _SALTED | _MESSAGES:
                return body
            # The client's own salt is kept, but hashed with the tenant's name, so that it cannot reach another's cache.
            own = field(body, "cache_salt") or b""
            salt = self._own_name(own.decode("latin-1"))
            return with_field(body, "cache_salt", b'"%b"' % salt.encode())
        except SpliceError as error:
            raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error

    def _own_name(self, name: str) -> str:
        """Return a client's name for something cached as one that no other tenant can name."""
        return hashlib.sha256(msgspec.json.encode([self.name, name])).hexdigest()

    def _with_media_names(self, body: bytes) -> bytes:
        """Return a body whose media items have names of this tenant. Raises SpliceError, RequestError (400).

        vLLM finds an item in its media cache by the client's `uuid` alone.
        """
        if not any(mark in body for mark in _MEDIA_NAME_MARKS):
            return body
        try:
            fields = read_json(body, MediaFields)
            for name in MediaFields.__struct_fields__:
                value = getattr(fields, name)
                if self._rename_media(value):
                    body = with_field(body, name, msgspec.json.encode(value))
        except (msgspec.DecodeError, OverflowError) as error:
            raise RequestError(f"The names of media items cannot be read: {error}. Omit each {_MEDIA_NAME}.") from error
        return body

    def _rename_media(self, value: Any) -> bool:
        """Give the media items in a list of messages names of this tenant. Return whether there are any."""
        renamed = False
        for part in parts_in(value):
            given = part.get(_MEDIA_NAME)
            if given is not None:
                part[_MEDIA_NAME] = self._own_name(given if isinstance(given, str) else repr(given))
                renamed = True
        return renamed

    def check_names(self, fields: dict[str, Any]) -> None:
        """Raise RequestError (400) for a field by which an isolated tenant could find what others have cached."""
        if self._isolate and (found := control_fields(fields, NAMES_OF_CACHED, _NAMES_OF_CACHED_INSIDE)):
            raise RequestError(
                f"{found[0]} may find the cache of another tenant. Omit it.", param=found[0], code="not_isolated"
            )

    def headers_for_workers(self, headers: Headers) -> Headers:
        """Return the headers without those by which engines find what other tenants have cached."""
        if not self._isolate:
            return headers
        return [header for header in headers if header[0].replace(b"_", b"-") != _DYNAMO_SALT_HEADER]

    def with_priority(self, body: bytes, asked: object) -> bytes:
        """Return a body whose priority, if it has one, is no better than the tenant's. Raises RequestError (400)."""
        if asked is None:
            return body
        if type(asked) is not int:
            raise RequestError("priority is not an integer. Send an integer, or omit it.", param="priority")
        return with_field(body, "priority", b"%d" % self.priority) if asked < self.priority else body

    def check_adapter(self, asked: object) -> None:
        """Raise RequestError (403) for an adapter beside the model, if the tenant may not use all models."""
        if asked is not None and self._models is not None:
            raise RequestError(
                f"This API key is limited to some models. Send the adapter as the model, not in {ADAPTER}.",
                status=403,
                type="permission_error",
                param=ADAPTER,
                code="model_not_allowed",
            )

    def may_use(self, model: str | None) -> bool:
        return self._models is None or model in self._models

    def check_model(self, model: str | None) -> None:
        """Raise RequestError (403) for a model that the tenant may not use."""
        if not self.may_use(model):
            raise RequestError(
                f"This API key may not use the model {model!r}. Send one of: {', '.join(sorted(self._models or ()))}.",
                status=403,
                type="permission_error",
                param="model",
                code="model_not_allowed",
            )

    def admit(self, model: str | None, tokens: int) -> None:
        """Charge an allowed request. Raises RequestError: 403 for the model, 429 for the rate."""
        self.check_model(model)
        for bucket, what in ((self._requests, "requests a second"), (self._tokens, "tokens a minute")):
            if bucket is not None and (wait := bucket.wait()):
                seconds = math.ceil(wait)
                raise RequestError(
                    f"This API key has used up its {what}. Retry in {seconds} s.",
                    status=429,
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        self._charge(1, tokens)

    def spend(self, tokens: int = 0, requests: int = 0) -> None:
        """Charge tokens that were used, and requests beside the admitted one."""
        self._charge(requests, tokens)

    def spent_elsewhere(self, requests: int, tokens: int) -> None:
        """Charge requests and tokens that another router admitted."""
        self._take(requests, tokens)

    def _take(self, requests: int, tokens: int) -> None:
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None:
                bucket.charge(amount)

    def _charge(self, requests: int, tokens: int) -> None:
        if self._requests is not None or self._tokens is not None:
            self._take(requests, tokens)
            self.on_spent(self.name, requests, tokens)


def without_credentials(headers: Headers) -> Headers:
    """Return the headers without the client's key."""
    return [each for each in headers if each[0] not in _CREDENTIALS]


class AccessControl:
    """The tenants and the operator, by the key that a request carries."""

    def __init__(
        self, settings: TenantsSettings, token: str, aliases: Mapping[str, str] = {}, hooks: HookSettings | None = None
    ) -> None:
        """Create it. `hooks`: what may accept keys that the settings do not have."""
        self._checks_keys = hooks is not None and hooks.checks_keys
        self._asks_hooks = self._checks_keys or (hooks is not None and bool(hooks.before))
        self._token = token.encode()
        # Paths that a tenant's key opens. None: every tenant route. Otherwise only routes whose salt engines read.
        self._paths: frozenset[str] | None = None
        if settings.isolate:
            self._paths = _SALTED | _WITHOUT_CACHE | (_MESSAGES if settings.salted_messages else frozenset())
        self._tenants: dict[str, Tenant] = {}
        self._named = {
            name: Tenant(name, each, settings.isolate, aliases=aliases) for name, each in settings.named.items()
        }
        for name, each in settings.named.items():
            self._tenants |= dict.fromkeys(each.keys, self._named[name])

    def tenant(self, name: str) -> Tenant:
        return self._named[name]

    def share_spent(self, spent: Callable[[str, int, int], None]) -> None:
        """Call `spent` with the tenant, requests and tokens of everything that tenants spend here."""
        for tenant in self._named.values():
            tenant.on_spent = spent

    def spent_elsewhere(self, name: str, requests: int, tokens: int) -> None:
        """Charge a tenant for what it spent at other routers."""
        if name in self._named:
            self._named[name].spent_elsewhere(requests, tokens)

    @property
    def requires_keys(self) -> bool:
        """True if tenants or a check of keys are configured, so that requests need a key."""
        return bool(self._named) or self._checks_keys

    @property
    def has_token(self) -> bool:
        """True if a token for the operator is configured."""
        return bool(self._token)

    def is_operator(self, headers: Headers) -> bool:
        """Return whether a request carries the operator's token."""
        return bool(self._token) and compare_digest(credential(headers).encode(), self._token)

    def check(self, route: Route, headers: Headers) -> Tenant | None:
        """Return the tenant that sent a request, if any. Raises RequestError: 401 (unknown key), 403 (wrong route).

        A hook checks an unknown key later, if the settings have one.
        """
        if route.access is Access.ANYONE or self.is_operator(headers):
            return None
        tenant = self._tenants.get(hashed_key(credential(headers)))
        if tenant is None and not (self._asks_hooks and route.access is Access.TENANT):
            raise unknown_key()
        is_open = route.own or self._paths is None or route.path in self._paths
        is_theirs = route.access is Access.TENANT or (route.access is Access.WRONG_METHOD and route.for_tenants)
        opens = is_theirs and is_open
        unknown = route.access is Access.ENGINE and not route.own  # answered with 404 later
        if not opens and not unknown:
            raise RequestError(
                "This route requires the operator's token, not an API key.",
                status=403,
                type="permission_error",
                code="not_allowed",
            )
        return tenant


def unknown_key() -> RequestError:
    """Return the error for a key that is not known."""
    return RequestError(
        "Send Authorization: Bearer with an API key of this service.",
        status=401,
        type="authentication_error",
        param="authorization",
        code="invalid_api_key",
    )


def credential(headers: Headers) -> str:
    """Return the key of a request: a bearer token, or `x-api-key` as Anthropic's clients send it."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.decode("latin-1")
        if name == b"sec-websocket-protocol" and (found := _KEY_SUBPROTOCOL.search(value)):
            return found[1].decode("latin-1")
        if name == b"authorization":
            scheme, _, given = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return given.strip()
    return ""
