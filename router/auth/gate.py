"""The checks that every request passes, whether a client or Envoy sent it: of its head, its sender and its body.

head ──▶ canonical path ──▶ route ──▶ host, site, headers ──▶ who asks ──▶ body
  └────────── 400 ──────────────────────── 403, 421 ────────── 401, 403 ──── 400, 413
"""

from __future__ import annotations

from typing import Final, NoReturn

from http_api.errors import RequestError
from router.auth.arrivals import Arrivals
from router.auth.bodies import BodyCheck
from router.auth.engine_fields import refusal, steering_header, without_steering
from router.auth.hosts import check_host, check_site, is_loopback
from router.auth.model_aliases import with_served_model
from router.auth.routes import Access, Route, Routes
from router.auth.tenants import AccessControl, Tenant, without_credentials
from router.http.headers import Headers
from router.http.strict_requests import TargetError, canonical_path
from router.settings import EngineFields, Settings, WorkerKeys

# In place of a port: the Unix socket over which the processes of one service ask each other.
PROCESS_SOCKET: Final = 0
_MODELS = b"/v1/models/"
# Asked by what stands in front of a router, under whatever name that has.
_ANY_HOST = frozenset({"/health", "/ready", "/v1/models"})


class Admitted:
    """What a head asks for, and who asks: a `tenant`, the `operator`, or anyone. The same for the same head."""

    __slots__ = ("content_type", "engine_fields", "keeps_credentials", "keyed", "route", "tenant")

    def __init__(
        self,
        route: Route,
        content_type: bytes,
        tenant: Tenant | None,
        engine_fields: EngineFields,
        keeps_credentials: bool,
        keyed: bool,
    ) -> None:
        """`engine_fields`: what becomes of those. `keeps_credentials`: the key is meant for workers, not for us.

        `keyed`: where it has none, the worker is shown its own.
        """
        self.route = route
        self.content_type = content_type
        self.tenant = tenant
        self.engine_fields = engine_fields
        self.keeps_credentials = keeps_credentials
        self.keyed = keyed


class AuthGate:
    """The checks of one service.

    `access`: its tenants and its token. `arrivals`: the bodies that are arriving; `bodies`: those that came.
    """

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self.access = AccessControl(settings.tenants, server.token, settings.aliases)
        self.arrivals = Arrivals(settings.limits.arriving_bytes)
        self._routes = Routes(settings.proxy.more_routes)
        self._aliases = settings.aliases
        self.bodies = BodyCheck(settings.limits)
        fields = settings.proxy.engine_fields
        if fields is EngineFields.AUTO:
            fields = EngineFields.REFUSE if settings.tenants.named else EngineFields.STRIP
        self._engine_fields = fields
        self._loopback = is_loopback(server.host)
        # Workers that want a key are not opened to a network by a router that asks for none, unless that is said.
        self._always_keyed = settings.proxy.worker_keys is WorkerKeys.ALWAYS
        self._keyed = settings.proxy.worker_keys is WorkerKeys.AUTO and self._loopback
        self._hosts = frozenset(server.allowed_hosts)
        self._admin_port = server.admin_port

    def admit(self, method: str, target: bytes, headers: Headers, port: int | None = None) -> Admitted:
        """Check a head. Raises RequestError (400, 401, 403, 404, 405, 415, 421).

        `port`: the port that it was received at, or `PROCESS_SOCKET`; None if that does not matter.
        """
        route = self._route(method, target)
        if route.access is Access.PROCESS:
            if port == PROCESS_SOCKET:
                return Admitted(route, b"", None, EngineFields.PASS, keeps_credentials=False, keyed=False)
            route = Route(method, route.path, Access.ENGINE)
        self._check_origin(route, headers)
        if self._admin_port is not None and port and port != self._admin_port and _is_admin(route):
            raise RequestError(
                f"{route.path} is served at server.admin_port alone.",
                status=404,
                type="not_found_error",
                code="admin_port",
            )
        access = self.access
        operator = access.is_operator(headers)
        tenant = access.check(route, headers) if access.has_tenants else None
        self._check_access(route, operator)
        fields = EngineFields.PASS if operator else self._engine_fields
        if not route.own and fields is EngineFields.REFUSE and (steering := steering_header(headers)) is not None:
            raise refusal(steering.decode("latin-1"))
        content_type = b"" if route.own or fields is EngineFields.PASS else _content_type(headers)
        ends_here = access.has_tenants or operator or self._always_keyed
        return Admitted(route, content_type, tenant, fields, not ends_here, ends_here or self._keyed)

    @property
    def withholds_keys(self) -> bool:
        """Whether there are neither tenants nor strangers that are let in with the keys of workers."""
        return not (self.access.has_tenants or self._always_keyed or self._keyed)

    def headers_for_workers(self, admitted: Admitted, headers: Headers) -> Headers:
        """A request's headers without those that are the router's to read or to say."""
        if admitted.engine_fields is not EngineFields.PASS:
            headers = without_steering(headers)
        return headers if admitted.keeps_credentials else without_credentials(headers)

    def body(self, admitted: Admitted, body: bytes) -> tuple[bytes, bytes]:
        """The body to read and to send on, and what to read of it where its prompt does not count.

        Raises RequestError (400, 413).
        """
        body, named = self.bodies.checked(
            admitted.route, admitted.content_type, body, admitted.tenant, admitted.engine_fields
        )
        if self._aliases:
            return with_served_model(body, self._aliases), with_served_model(named, self._aliases)
        return body, named

    def _route(self, method: str, target: bytes) -> Route:
        try:
            path = canonical_path(target, encoded_slashes=target.startswith(_MODELS))
        except TargetError as error:
            raise RequestError(f"The request's target is not accepted: {error}.", code="target") from error
        return self._routes.find(method, path)

    def _check_origin(self, route: Route, headers: Headers) -> None:
        changes = route.access in (Access.OPERATOR, Access.ENGINE)
        if changes or (route.own and route.path not in _ANY_HOST):
            check_host(headers, self._loopback, self._hosts)
        if changes:
            check_site(headers)

    def _check_access(self, route: Route, operator: bool) -> None:
        if route.access is Access.NOBODY:
            message = f"{route.path} takes no {route.method}. Send {', '.join(route.methods)}."
            raise RequestError(message, status=405, code="method_not_allowed")
        if route.access is Access.OPERATOR and not self.access.has_token and not self._loopback:
            raise RequestError(
                "This changes the state of the service, which others than this machine can reach. Set server.token.",
                status=403,
                type="permission_error",
                code="not_allowed",
            )
        if route.access is Access.ENGINE and not operator:
            self._refuse_engine_route(route)

    def _refuse_engine_route(self, route: Route) -> NoReturn:
        if not self.access.has_token:
            raise RequestError(
                f"{route.method} {route.path} is not among the routes for inference, and may be an engine's own. "
                "It wants the operator's token: set server.token, or name it in proxy.more_routes.",
                status=403,
                type="permission_error",
                code="not_allowed",
            )
        raise RequestError(
            f"{route.method} {route.path} wants the operator's token. "
            "Send Authorization: Bearer with the token of server.token.",
            status=401,
            type="authentication_error",
            param="authorization",
        )


def _content_type(headers: Headers) -> bytes:
    """How a body is to be read. Raises RequestError (415) where others may read something else in it."""
    kinds = [value for name, value in headers if name == b"content-type"]
    codings = [value for name, value in headers if name == b"content-encoding" and value.strip().lower() != b"identity"]
    if len(kinds) > 1 or codings:
        name = "content-encoding" if codings else "content-type"
        problem = "a content-encoding" if codings else "several of content-type"
        raise RequestError(
            f"The request has {problem}. Send the body as it is, and say once what it is.", status=415, param=name
        )
    return kinds[0] if kinds else b""


def _is_admin(route: Route) -> bool:
    """Whether a route is for who runs the service, not for who uses it."""
    if route.access in (Access.OPERATOR, Access.ENGINE):
        return True
    return route.own and route.access is not Access.TENANT and route.path not in _ANY_HOST
