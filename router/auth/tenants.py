"""Tenants, known by their API keys: what these open, and how often.

A tenant's key opens the inference endpoints, for the models it may use and at its rates. All else that a router and
its workers offer wants the operator's token as soon as there are tenants: what is cached tells what others asked. Only
liveness, readiness, metrics and the empty live page stay open.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from secrets import compare_digest

import msgspec

from http_api.errors import RequestError
from router.apis.json_edit import SpliceError, field, with_field
from router.auth.routes import Access, Route
from router.http.headers import Headers
from router.settings import TenantSettings, TenantsSettings
from router.sharing import LoadSharing

_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_MESSAGES = frozenset(
    {"/v1/messages", "/v1/messages/count_tokens"}
)  # salted where the settings say that engines read it
_WITHOUT_CACHE = frozenset({"/v1/models", "/v1/embeddings"})
# Engines read no cache salt here: closed to tenants that are kept apart.
_UNSALTED = frozenset({"/v1/rerank", "/v1/score"})
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


def hashed_key(key: str) -> str:
    """An API key as the settings have it."""
    return hashlib.sha256(key.encode()).hexdigest()


# What SGLang takes beside `model`: an adapter by its name, or one for each prompt.
ADAPTER = "lora_path"


class Bucket:
    """Fills with `rate` a second up to what comes in `seconds`. A charge may leave a debt, which is waited for."""

    def __init__(self, rate: float, seconds: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._most = max(rate * seconds, 1.0)
        self._clock = clock
        self._level = self._most
        self._at = clock()

    def wait(self) -> float:
        """Seconds until there is one again; 0 when there is."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(1.0 - self._level, 0.0) / self._rate

    def charge(self, amount: float) -> None:
        """Take something out."""
        self._level -= amount


class Tenant:
    """A tenant and what it has left."""

    def __init__(
        self,
        name: str,
        settings: TenantSettings,
        isolate: bool,
        clock: Callable[[], float] = time.monotonic,
        aliases: Mapping[str, str] = {},
    ) -> None:
        """`aliases`: the models behind names that its settings may have instead."""
        self.name = name
        self.on_spent: Callable[[str, int, int], None] = lambda *_: None
        self.priority = settings.priority
        self._models = settings.models and [aliases.get(model, model) for model in settings.models]
        self._isolate = isolate
        requests, tokens = settings.requests_per_second, settings.tokens_per_minute
        self._requests = Bucket(requests, 1.0, clock) if requests else None
        self._tokens = Bucket(tokens / 60, 60.0, clock) if tokens else None

    def isolated(self, path: str, body: bytes) -> bytes:
        """A body whose cached prefix no other tenant shares. Raises RequestError (400) when it cannot be changed."""
        if not self._isolate or path not in _SALTED | _MESSAGES:
            return body
        try:
            # Whatever a client sends as its own, it gets no other tenant's.
            own = field(body, "cache_salt") or b""
            salt = hashlib.sha256(msgspec.json.encode([self.name, own.decode("latin-1")])).hexdigest()
            return with_field(body, "cache_salt", b'"%b"' % salt.encode())
        except SpliceError as error:
            raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error

    def with_priority(self, body: bytes, asked: object) -> bytes:
        """A body that asks the engine for no better priority than this tenant may have; `asked`: what it asks for.

        One that asks for none stays as it is: engines without priorities refuse a body that has one. Raises
        RequestError (400) for what engines may read as another number than we do.
        """
        if asked is None:
            return body
        if type(asked) is not int:
            raise RequestError("priority is no integer. Send one, or leave it out.", param="priority")
        return with_field(body, "priority", b"%d" % self.priority) if asked < self.priority else body

    def check_adapter(self, asked: object) -> None:
        """Refuse an adapter that a body names beside its model, where not all models are this tenant's: with 403."""
        if asked is not None and self._models is not None:
            raise RequestError(
                f"This API key is for some models alone. Name the adapter as the model, not in {ADAPTER}.",
                status=403,
                type="permission_error",
                param=ADAPTER,
                code="model_not_allowed",
            )

    def may_use(self, model: str | None) -> bool:
        """Whether its keys open a model."""
        return self._models is None or model in self._models

    def admit(self, model: str | None, tokens: int) -> None:
        """Let a request through, or raise RequestError: 403 for the model, 429 for the rate."""
        if not self.may_use(model):
            raise RequestError(
                f"This API key may not use the model {model!r}. Send one of: {', '.join(sorted(self._models or ()))}.",
                status=403,
                type="permission_error",
                param="model",
                code="model_not_allowed",
            )
        for bucket, what in ((self._requests, "requests a second"), (self._tokens, "tokens a minute")):
            if bucket is not None and (wait := bucket.wait()):
                seconds = math.ceil(wait)
                raise RequestError(
                    f"This API key has used up its {what}. Try again in {seconds} s.",
                    status=429,
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        self._charge(1, tokens)

    def spend(self, tokens: int) -> None:
        """Tokens were used."""
        self._charge(0, tokens)

    def spent_elsewhere(self, requests: int, tokens: int) -> None:
        """Another router let requests and tokens through."""
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
    """The headers without the key that was meant for us."""
    return [each for each in headers if each[0] not in _CREDENTIALS]


class AccessControl:
    """Who may pass, by the key that a request carries."""

    def __init__(self, settings: TenantsSettings, token: str, aliases: Mapping[str, str] = {}) -> None:
        self._token = token.encode()
        self._paths = _SALTED | _WITHOUT_CACHE | (frozenset() if settings.isolate else _UNSALTED)
        if settings.salted_messages or not settings.isolate:
            self._paths |= _MESSAGES
        self._tenants: dict[str, Tenant] = {}
        self._named = {
            name: Tenant(name, each, settings.isolate, aliases=aliases) for name, each in settings.named.items()
        }
        for name, each in settings.named.items():
            self._tenants |= dict.fromkeys(each.keys, self._named[name])

    def tenant(self, name: str) -> Tenant:
        """A tenant by its name."""
        return self._named[name]

    def share(self, sharing: LoadSharing) -> None:
        """Let rates hold for all routers together."""
        for tenant in self._named.values():
            tenant.on_spent = sharing.spent

        def spent(name: str, requests: int, tokens: int) -> None:
            if name in self._named:
                self._named[name].spent_elsewhere(requests, tokens)

        sharing.on_spent.append(spent)

    @property
    def has_tenants(self) -> bool:
        """Whether requests want a key."""
        return bool(self._named)

    @property
    def has_token(self) -> bool:
        """Whether there is a token for the operator."""
        return bool(self._token)

    def is_operator(self, headers: Headers) -> bool:
        """Whether a request carries the operator's token."""
        return bool(self._token) and compare_digest(credential(headers).encode(), self._token)

    def check(self, route: Route, headers: Headers) -> Tenant | None:
        """Who asks, where there are tenants; None for the operator and for what is open.

        Raises RequestError: 401 without a key that is known, 403 with the wrong one.
        """
        if route.access is Access.ANYONE or self.is_operator(headers):
            return None
        tenant = self._tenants.get(hashed_key(credential(headers)))
        if tenant is None:
            raise RequestError(
                "Send Authorization: Bearer with an API key of this service.",
                status=401,
                type="authentication_error",
                param="authorization",
                code="invalid_api_key",
            )
        opens = route.access in (Access.TENANT, Access.NOBODY) and (route.own or route.path in self._paths)
        if not opens:
            raise RequestError(
                "This wants the admin token, not an API key.", status=403, type="permission_error", code="not_allowed"
            )
        return tenant


def credential(headers: Headers) -> str:
    """The key that a request carries: as a bearer token, or in `x-api-key` as Anthropic's clients send it."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.decode("latin-1")
        if name == b"authorization":
            scheme, _, given = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return given.strip()
    return ""
