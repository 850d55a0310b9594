"""The checks that every request passes before it is routed.

- `gate`: all checks in their order, with those of the `Host` header and of a browser's site.
- `routes`: the allow-list of methods and paths, with the required access.
- `tenants`: API keys, their permissions and their rates.
- `engine_fields`: fields and headers that control an engine.
- `bodies`: one meaning for each body, limits on its work, and limits on bodies that are being received.
"""

from __future__ import annotations

from router.auth.bodies import ArrivingBodies, BodyCheck, too_large, too_slow
from router.auth.gate import PROCESS_SOCKET, Admitted, AuthGate
from router.auth.routes import Access, Route
from router.auth.tenants import AccessControl, Tenant, hashed_key, without_credentials

__all__ = [
    "PROCESS_SOCKET",
    "Access",
    "AccessControl",
    "Admitted",
    "ArrivingBodies",
    "AuthGate",
    "BodyCheck",
    "Route",
    "Tenant",
    "hashed_key",
    "too_large",
    "too_slow",
    "without_credentials",
]
