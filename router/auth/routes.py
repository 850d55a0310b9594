"""The allow-list: methods and paths that clients may request, each with the required access.

Engines have endpoints that put them to sleep, load code or show their settings. A path that is not listed here is
treated as an engine's endpoint and requires the operator's token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum, auto

from router.apis.endpoints import BY_LOAD, PROMPTED
from router.fleet.engine_commands import COMMANDS
from router.sharing.worker_processes import CHANGES_PATH


class Access(Enum):
    """The access that a route requires."""

    ANYONE = auto()
    TENANT = auto()  # requires an API key if tenants are configured, else nothing
    CALLER = auto()  # requires the operator's token if tenants are configured, else nothing
    # Changes the state: requires the operator's token. If none is set, the router must listen on loopback.
    OPERATOR = auto()
    ENGINE = auto()  # an engine's own endpoint: requires the operator's token
    PROCESS = auto()  # another process of this service, over the Unix socket
    WRONG_METHOD = auto()  # the path allows other methods only


# The accesses of public routes: with tenants, and without.
_FOR_CLIENTS = frozenset({Access.ANYONE, Access.TENANT})
_FOR_ANYONE = frozenset({Access.ANYONE, Access.TENANT, Access.CALLER})


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path.

    - `own`: the router answers the request itself.
    - `json`: the body is one JSON object.
    - `pure`: the request changes nothing lasting, so it may be sent twice.
    - `generates`: another worker may be tried as long as no byte of the response was received.
    - `websocket`: the request is the handshake of a WebSocket.
    - `methods`: the allowed methods, for a path that does not allow this one.
    - `for_tenants`: tenants may use one of these methods.
    """

    method: str
    path: str
    access: Access
    own: bool = False
    json: bool = False
    pure: bool = False
    generates: bool = False
    websocket: bool = False
    methods: tuple[str, ...] = ()
    for_tenants: bool = False


_RESPONSES = "/v1/responses"
_TOKENS = ("/tokenize", "/detokenize")
# The inference API. router/auth/tenants.py says which of its paths an isolated tenant may use.
_INFERENCE = [
    Route(
        "POST",
        path,
        Access.CALLER if path in _TOKENS else Access.TENANT,
        json=True,
        pure=path != _RESPONSES,
        generates=path in PROMPTED and path != _RESPONSES,
    )
    for path in (*PROMPTED, *BY_LOAD)
]
_OWN = [
    *(Route("GET", path, Access.ANYONE, own=True) for path in ("/", "/health", "/ready", "/metrics", "/ui")),
    *(Route("GET", path, Access.ANYONE, own=True) for path in ("/liveness", "/readiness")),
    *(Route("GET", path, Access.TENANT, own=True) for path in ("/v1/models", "/v1/models/{name}")),
    *(Route("GET", path, Access.CALLER, own=True) for path in ("/workers", "/dump", "/docs", "/openapi.json")),
    *(Route("GET", path, Access.CALLER, own=True) for path in ("/live", "/requests")),
    *(Route("POST", path, Access.CALLER, own=True) for path in ("/match", "/query", "/query_by_hash", "/explain")),
    *(Route("POST", path, Access.OPERATOR, own=True) for path in ("/register", "/unregister")),
    *(Route("POST", path, Access.OPERATOR, own=True) for path in ("/workers", "/workers/drain", "/workers/undrain")),
    Route("DELETE", "/workers", Access.OPERATOR, own=True),
    # Calls of trainers, by the names of other routers.
    Route("DELETE", "/workers/{id}", Access.OPERATOR, own=True),
    *(Route("POST", path, Access.OPERATOR, own=True) for path in ("/add_worker", "/remove_worker")),
    Route("GET", "/list_workers", Access.CALLER, own=True),
    Route("POST", "/finish_session", Access.CALLER, own=True),
    # Dynamo's selection service.
    *(Route("GET", f"/selection/{name}", Access.ANYONE, own=True) for name in ("health", "ready")),
    *(Route("GET", f"/selection/{name}", Access.CALLER, own=True) for name in ("workers", "loads")),
    *(
        Route("POST", f"/selection/{name}", Access.CALLER, own=True)
        for name in ("select", "overlap_scores", "potential_loads")
    ),
    *(
        Route("POST", f"/selection/{name}", Access.OPERATOR, own=True)
        for name in ("select_and_reserve", "reservations", "workers")
    ),
    *(
        Route("POST", f"/selection/reservations/{{id}}/{name}", Access.OPERATOR, own=True)
        for name in ("prefill_complete", "output_block")
    ),
    Route("DELETE", "/selection/reservations/{id}", Access.OPERATOR, own=True),
    *(Route(method, "/selection/workers/{id}", Access.OPERATOR, own=True) for method in ("PATCH", "DELETE")),
    # These endpoints make engines read files and URLs.
    *(Route("POST", path, Access.ENGINE, own=True) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    *(
        Route(each.method, name, Access.OPERATOR if each.open_on_loopback else Access.ENGINE, own=True)
        for each in COMMANDS
        for name in each.names
    ),
    Route("GET", CHANGES_PATH, Access.PROCESS, own=True),
]
# Forwarded endpoints of OpenAI's API and of engines. None shows or changes an engine's settings.
_PASSED = [
    *(Route("GET", path, Access.CALLER, pure=True) for path in ("/version", "/ping", "/model_info", "/get_model_info")),
    *(
        Route("GET", path, Access.CALLER, pure=True)
        for path in (f"{_RESPONSES}/{{id}}", f"{_RESPONSES}/{{id}}/input_items")
    ),
    Route("DELETE", f"{_RESPONSES}/{{id}}", Access.CALLER),
    Route("POST", f"{_RESPONSES}/{{id}}/cancel", Access.CALLER),
    *(
        Route("POST", path, Access.CALLER, json=True, pure=True)
        for path in (
            "/v1/chat/completions/render",
            "/v1/completions/render",
            "/v1/messages/render",
            f"{_RESPONSES}/render",
            "/v1/chat/completions/batch",
            "/v1/tokenize",
            "/v1/detokenize",
            "/inference/v1/generate/derender",
            "/v1/embeddings/batch",
            "/encode",
            "/invocations",
        )
    ),
    Route("GET", "/v1/realtime", Access.TENANT, websocket=True),
    *(
        Route("POST", f"/v1/realtime/{name}", Access.TENANT, json=True)
        for name in ("client_secrets", "sessions", "transcription_sessions")
    ),
    *(
        Route("POST", path, Access.TENANT, json=True, pure=True)
        for path in (
            "/v1/classify",
            "/v1/pooling",
            "/v1/moderations",
            "/v1/images/generations",
            f"{_RESPONSES}/compact",
            f"{_RESPONSES}/input_tokens",
        )
    ),
    *(
        Route("POST", path, Access.TENANT)
        for path in (
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/images/edits",
            "/v1/images/variations",
        )
    ),
    *(
        Route(method, f"/v1/{name}{rest}", Access.CALLER, pure=method == "GET")
        for name in ("files", "batches", "uploads", "videos", "conversations", "vector_stores")
        for method, rest in (
            ("POST", ""),
            ("GET", ""),
            ("GET", "/{id}"),
            ("POST", "/{id}"),
            ("DELETE", "/{id}"),
            ("GET", "/{id}/content"),
            ("POST", "/{id}/cancel"),
            ("POST", "/{id}/complete"),
            ("POST", "/{id}/parts"),
            ("GET", "/{id}/items"),
            ("POST", "/{id}/items"),
            ("GET", "/{id}/files"),
            ("POST", "/{id}/files"),
            ("POST", "/{id}/search"),
        )
    ),
]

# Patterns for {id}, and for {name}: a model's name, which may contain slashes.
_ID = r"[A-Za-z0-9_.:~@=+-]{1,256}"
_NAME = r".{1,512}"


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\{id\}", _ID).replace(r"\{name\}", _NAME))


# Longer paths, and more of them, are not compared with the known ones: clients choose what they send.
_LONGEST_COMPARED = 128
_MOST_COMPARED = 1024


class Routes:
    """The allow-list. `more` are additional routes from the settings, such as "POST /v1/mine", for tenants too."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        listed = [*_INFERENCE, *_OWN, *_PASSED]
        known = {(route.method, route.path): place for place, route in enumerate(listed)}
        for line in more:
            method, _, path = line.partition(" ")
            place = known.get((method, path))
            if place is None:
                listed.append(Route(method, path, Access.TENANT))
            elif listed[place].own:  # a route of the router's own, which the settings open to engines
                listed[place] = Route(method, path, Access.CALLER)
            else:
                listed[place] = replace(listed[place], access=Access.TENANT)
        self._exact = {(route.method, route.path): route for route in listed if "{" not in route.path}
        self._patterns = [(_pattern(route.path), route) for route in listed if "{" in route.path]
        self._public = {
            public: sorted({route.path for route in self._exact.values() if route.access in public})
            for public in (_FOR_CLIENTS, _FOR_ANYONE)
        }
        self._nearest: dict[tuple[str, bool], str | None] = {}

    def find(self, method: str, path: str) -> Route:
        """Return the route of a canonical path. HEAD is treated as GET. OPTIONS is allowed for forwarded paths."""
        asked = "GET" if method == "HEAD" else method
        route = self._exact.get((asked, path))
        if route is not None:
            return route
        known = self._of_path(path)
        for route in known:
            if route.method == asked:
                return route
        if not known:
            return Route(method, path, Access.ENGINE)
        if method == "OPTIONS" and not known[0].own:
            return Route(method, path, Access.CALLER, pure=True)
        methods = tuple(sorted({route.method for route in known}))
        for_tenants = any(route.access is Access.TENANT for route in known)
        return Route(method, path, Access.WRONG_METHOD, methods=methods, for_tenants=for_tenants)

    def nearest(self, path: str, guarded: bool) -> str | None:
        """Return the public path that is most like an unknown one. `guarded`: callers need the operator's token."""
        if len(path) > _LONGEST_COMPARED:
            return None
        key = path, guarded
        if key not in self._nearest:
            if len(self._nearest) >= _MOST_COMPARED:
                self._nearest.clear()
            self._nearest[key] = _most_like(path, self._public[_FOR_CLIENTS if guarded else _FOR_ANYONE])
        return self._nearest[key]

    def _of_path(self, path: str) -> list[Route]:
        found = [route for (_, known), route in self._exact.items() if known == path]
        return found + [route for pattern, route in self._patterns if pattern.fullmatch(path)]


def _most_like(path: str, known: list[str]) -> str | None:
    """Return the path among `known` that ends as this one does, or else the most similar one."""
    end = path.rstrip("/").rpartition("/v1")[2].lower()
    same_end = [each for each in known if end and (each == f"/v1{end}" or each == end)]
    return next(iter(same_end or get_close_matches(path.lower(), known, 1)), None)
