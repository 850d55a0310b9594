"""The auth gate: the checks of a request's head, sender and body, whether a client or Envoy sent it.

    head ──▶ canonical path ──▶ route ──▶ host, site, headers ──▶ sender ──▶ body
      └────────── 400 ──────────────────────── 403, 421 ────────── 401, 403 ──── 400, 413

A web page can make a browser send requests to a router on the user's machine or network. If the router listens on
loopback, a public name in `Host` is refused, because it can be DNS rebinding. Requests that change the state are
refused if another site's page sent them.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Final, NoReturn
from urllib.parse import urlsplit

import structlog

from http_api.errors import RequestError
from router.apis.requests import UsualChat
from router.auth.bodies import BodyCheck, with_served_model
from router.auth.engine_fields import control_header, refusal, without_control_headers
from router.auth.routes import Access, Route, Routes
from router.auth.tenants import AccessControl, Tenant, without_credentials
from router.http.arriving import ArrivingBytes
from router.http.headers import Headers, asking_uncompressed
from router.http.strict_requests import TargetError, canonical_path
from router.settings import EngineFields, Settings, WorkerKeys

log = structlog.get_logger()

# Names inside a machine, network or cluster (RFC 6761, 6762), which cannot be registered on the internet.
_PRIVATE: Final = frozenset({"localhost", "local", "internal", "svc"})
# Content types that a page may send to another site without a preflight (Fetch); curl sends the last one.
_SIMPLE: Final = frozenset({b"text/plain", b"multipart/form-data"})
_FORM: Final = b"application/x-www-form-urlencoded"
# Replaces the port for requests over the Unix socket, by which the processes of one service communicate.
PROCESS_SOCKET: Final = 0
_MODELS = b"/v1/models/"
# Unknown paths that are logged, and the characters of each.
_MOST_LOGGED: Final = 64
_LONGEST_LOGGED: Final = 128
# Paths that load balancers request with any Host.
_ANY_HOST = frozenset({"/health", "/liveness", "/ready", "/readiness", "/v1/models"})


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reachable only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(headers: Headers, loopback: bool, allowed: Collection[str]) -> None:
    """Raise RequestError if `Host` names another service. On loopback, or with `allowed`, public names are others."""
    given = [value for name, value in headers if name == b"host"]
    if len(given) > 1:
        raise RequestError("Duplicate Host header. Send it once.", code="host")
    if not given or not (loopback or allowed):
        return
    name = _name_of(given[0])
    if name is None:
        raise RequestError("Host is invalid. Send the name or address of this service.", code="host")
    if name in allowed or "." not in name or name.rstrip(".").rpartition(".")[2] in _PRIVATE or _is_address(name):
        return
    raise RequestError(
        f"Host is {name}, which is not this service. Add it to server.allowed_hosts if it is.",
        status=421,
        type="permission_error",
        code="host",
    )


def check_site(headers: Headers) -> None:
    """Raise RequestError (403, 415) for a state change that another site's page may have sent."""
    values: dict[bytes, set[bytes]] = {name: set() for name in (b"origin", b"sec-fetch-site", b"content-type", b"host")}
    for name, value in headers:
        if name in values:
            values[name].add(value.strip().lower())
    kinds = {value.partition(b";")[0].strip() for value in values[b"content-type"]}
    if not _SIMPLE.isdisjoint(kinds) or (_FORM in kinds and values[b"origin"]):
        raise RequestError(
            "This route accepts JSON only. Send content-type: application/json.", status=415, param="content-type"
        )
    foreign = any({_netloc_of(origin)} != values[b"host"] for origin in values[b"origin"])
    if foreign or not values[b"sec-fetch-site"].isdisjoint((b"cross-site", b"same-site")):
        raise RequestError(
            "Cross-site requests may not change the router's state.",
            status=403,
            type="permission_error",
            code="cross_site",
        )


def _name_of(host: bytes) -> str | None:
    try:
        return urlsplit(f"//{host.decode('ascii').strip()}").hostname
    except ValueError:
        return None


def _netloc_of(origin: bytes) -> bytes | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Admitted:
    """The result of a head's check, shared by equal heads: route, tenant, and how it is forwarded."""

    __slots__ = (
        "add_worker_key",
        "content_type",
        "engine_fields",
        "keeps_credentials",
        "route",
        "tenant",
        "unknown_key",
    )

    def __init__(
        self,
        route: Route,
        content_type: bytes,
        tenant: Tenant | None,
        engine_fields: EngineFields,
        keeps_credentials: bool,
        add_worker_key: bool,
        unknown_key: bool = False,
    ) -> None:
        """Describe an admitted request.

        - `keeps_credentials`: the client's key is forwarded to the worker.
        - `add_worker_key`: the worker's own key is added if the request has none.
        - `unknown_key`: a hook has to accept its key.
        """
        self.route = route
        self.content_type = content_type
        self.tenant = tenant
        self.engine_fields = engine_fields
        self.keeps_credentials = keeps_credentials
        self.add_worker_key = add_worker_key
        self.unknown_key = unknown_key

    def with_tenant(self, tenant: Tenant | None) -> Admitted:
        """Return the result for the tenant that a hook chose, or for a key that it accepted."""
        return Admitted(
            self.route, self.content_type, tenant, self.engine_fields, self.keeps_credentials, self.add_worker_key
        )


class AuthGate:
    """The checks of one service: tenants, arriving bodies, complete bodies."""

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self.access = AccessControl(settings.tenants, server.token, settings.aliases, settings.hooks)
        self.arrivals = ArrivingBytes(settings.limits.arriving_bytes)
        self._routes = Routes(settings.proxy.more_routes)
        self._aliases = settings.aliases
        self.bodies = BodyCheck(settings.limits)
        fields = settings.proxy.engine_fields
        if fields is EngineFields.AUTO:
            fields = EngineFields.REFUSE if settings.tenants.named else EngineFields.STRIP
        self._engine_fields = fields
        self.client_routing = settings.proxy.client_routing
        self.session_headers = [name.lower().encode() for name in settings.proxy.session_headers]
        self._loopback = is_loopback(server.host)
        # A router without authentication does not lend workers' keys to a network, unless the settings say so.
        self._always_add_worker_key = settings.proxy.worker_keys is WorkerKeys.ALWAYS
        self._add_worker_key = settings.proxy.worker_keys is WorkerKeys.AUTO and self._loopback
        self._hosts = frozenset(server.allowed_hosts)
        self._origins = frozenset(server.cors_origins)
        self._admin_port = server.admin_port
        self._unknown: set[str] = set()

    def admit(self, method: str, target: bytes, headers: Headers, port: int | None = None) -> Admitted:
        """Check a head that this `port` received. Raises RequestError (400, 401, 403, 404, 405, 415, 421)."""
        route = self._route(method, target)
        if route.access is Access.PROCESS:
            if port == PROCESS_SOCKET:
                return Admitted(route, b"", None, EngineFields.PASS, keeps_credentials=False, add_worker_key=False)
            route = Route(method, route.path, Access.ENGINE)
        self._check_origin(route, headers)
        if self._admin_port is not None and port and port != self._admin_port and _is_admin(route):
            raise RequestError(
                f"{route.path} is served only at server.admin_port.",
                status=404,
                type="not_found_error",
                code="admin_port",
            )
        access = self.access
        operator = access.is_operator(headers)
        tenant = access.check(route, headers) if access.requires_keys else None
        self._check_access(route, operator)
        fields = EngineFields.PASS if operator else self._engine_fields
        if not route.own and fields is EngineFields.REFUSE and (steering := control_header(headers)) is not None:
            raise refusal(steering.decode("latin-1"))
        content_type = b"" if route.own or fields is EngineFields.PASS else _content_type(headers)
        ends_here = access.requires_keys or operator or self._always_add_worker_key
        unknown = access.requires_keys and tenant is None and not operator and route.access is Access.TENANT
        return Admitted(route, content_type, tenant, fields, not ends_here, ends_here or self._add_worker_key, unknown)

    def method_without_body(self, method: str, target: bytes) -> str:
        """Return the method by which a gateway's request without a body is checked: POST for paths that allow only it.

        The worker receives the request's own method, and answers what it does not allow.
        """
        try:
            route = self._route(method, target)
        except RequestError:
            return method  # `admit` raises it
        posts = route.access is Access.WRONG_METHOD and route.methods == ("POST",)
        return "POST" if posts and not self._routes.find("POST", route.path).own else method

    def admitted_as(self, admitted: Admitted, tenant: str) -> Admitted:
        """Return the result for a request that a hook accepted. `tenant`: the tenant that it chose; "" for none."""
        return admitted.with_tenant(self.access.tenant(tenant) if tenant else None)

    @property
    def withholds_keys(self) -> bool:
        """True if workers' keys are never added, because requests are not authenticated."""
        return not (self.access.requires_keys or self._always_add_worker_key or self._add_worker_key)

    def headers_for_workers(self, admitted: Admitted, headers: Headers) -> Headers:
        """Return the headers to forward, without engine control, the router's credentials and compression."""
        if admitted.engine_fields is not EngineFields.PASS:
            headers = without_control_headers(headers)
        if admitted.tenant is not None:
            headers = admitted.tenant.headers_for_workers(headers)
        return asking_uncompressed(headers if admitted.keeps_credentials else without_credentials(headers))

    def body(self, admitted: Admitted, body: bytes, reads_chat: bool = False) -> tuple[bytes, bytes | UsualChat]:
        """Return the body to forward, and what its check has read. Raises RequestError (400, 413).

        `reads_chat`: read a usual chat's messages, too.
        """
        body, known = self.bodies.checked(
            admitted.route, admitted.content_type, body, admitted.tenant, admitted.engine_fields, reads_chat
        )
        if self._aliases:
            if isinstance(known, tuple):
                model, messages, streamed, max_tokens = known
                known = (self._aliases.get(model, model), messages, streamed, max_tokens)
            else:
                known = with_served_model(known, self._aliases)
            return with_served_model(body, self._aliases), known
        return body, known

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
        if route.websocket:  # browsers open WebSockets of other sites without asking first
            check_host(headers, self._loopback, self._hosts)
            self._check_page(headers)

    def _check_page(self, headers: Headers) -> None:
        """Raise RequestError (403) for a WebSocket of a page whose origin `server.cors_origins` does not list."""
        hosts = [value.strip().lower() for name, value in headers if name == b"host"]
        for name, value in headers:
            if name != b"origin" or "*" in self._origins or value.decode("latin-1") in self._origins:
                continue
            if [_netloc_of(value.strip().lower())] != hosts:
                raise RequestError(
                    "Cross-site WebSockets are refused. List the page's origin in server.cors_origins.",
                    status=403,
                    type="permission_error",
                    code="cross_site",
                )

    def _check_access(self, route: Route, operator: bool) -> None:
        if route.access is Access.WRONG_METHOD:
            message = f"{route.path} does not allow {route.method}. Send {', '.join(route.methods)}."
            raise RequestError(message, status=405, code="method_not_allowed")
        if route.access is Access.OPERATOR and not self.access.has_token and not self._loopback:
            raise RequestError(
                "This request changes the state of a service that other machines reach. Set server.token to allow it.",
                status=403,
                type="permission_error",
                code="not_allowed",
            )
        if route.access is Access.ENGINE and not operator:
            self._refuse_engine_route(route)

    def _refuse_engine_route(self, route: Route) -> NoReturn:
        if not route.own:
            self._log_unknown(route)
            near = self._routes.nearest(route.path, self.access.requires_keys)
            raise RequestError(
                f"{route.path} does not exist here." + (f" Did you mean {near}?" if near else ""),
                status=404,
                type="not_found_error",
                code="not_allowed",
            )
        if not self.access.has_token:
            raise RequestError(
                f"{route.method} {route.path} requires the operator's token: set server.token.",
                status=403,
                type="permission_error",
                code="not_allowed",
            )
        raise RequestError(
            f"{route.method} {route.path} requires the operator's token. "
            "Send Authorization: Bearer with the token of server.token.",
            status=401,
            type="authentication_error",
            param="authorization",
        )

    def _log_unknown(self, route: Route) -> None:
        """Log a path that is not listed, once, with what would open it if it is an engine's."""
        line = f"{route.method} {route.path[:_LONGEST_LOGGED]}"
        if len(self._unknown) < _MOST_LOGGED and line not in self._unknown:
            self._unknown.add(line)
            hint = "an engine's route needs the operator's token, or an entry in proxy.more_routes"
            log.info("unknown path", route=line, hint=hint)


def _content_type(headers: Headers) -> bytes:
    """Return the content type. Raises RequestError (415) if an engine could read it differently."""
    kinds = [value for name, value in headers if name == b"content-type"]
    codings = [value for name, value in headers if name == b"content-encoding" and value.strip().lower() != b"identity"]
    if len(kinds) > 1 or codings:
        name = "content-encoding" if codings else "content-type"
        problem = "a content-encoding" if codings else "several content-type headers"
        raise RequestError(
            f"The request has {problem}. Send the body unencoded, with one content-type.", status=415, param=name
        )
    return kinds[0] if kinds else b""


def _is_admin(route: Route) -> bool:
    if route.access in (Access.OPERATOR, Access.ENGINE):
        return True
    return route.own and route.access is not Access.TENANT and route.path not in _ANY_HOST
