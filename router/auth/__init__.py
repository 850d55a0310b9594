"""The checks that every request passes before it is routed; `gate` has all of them in their order."""

from __future__ import annotations

from router.auth.bodies import BodyCheck, too_large, too_slow
from router.auth.gate import PROCESS_SOCKET, Admitted, AuthGate
from router.auth.routes import Access, Route
from router.auth.tenants import AccessControl, Tenant, hashed_key, without_credentials

__all__ = [
    "PROCESS_SOCKET",
    "Access",
    "AccessControl",
    "Admitted",
    "AuthGate",
    "BodyCheck",
    "Route",
    "Tenant",
    "hashed_key",
    "too_large",
    "too_slow",
    "without_credentials",
]
