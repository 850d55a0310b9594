"""What every request passes before anything is done with it.

door      the checks in their order; the other modules are one kind of check each
routes    the allow-list: methods and paths, and who may ask
tenants   API keys, what they open, and how often
hosts     whom a request is meant for, and which site it comes from
steering  fields and headers by which an engine would be told what the router decides
bodies    one meaning for each JSON body, and bounds on the work it makes
forms     the same for forms
arrivals  bounds on the bodies that are arriving
"""

from __future__ import annotations

from router.auth.arrivals import Arrivals, too_large, too_slow
from router.auth.bodies import BodyCheck
from router.auth.gate import PROCESS_SOCKET, Admitted, AuthGate
from router.auth.routes import Access, Route
from router.auth.tenants import AccessControl, Tenant, hashed_key, without_credentials

__all__ = [
    "PROCESS_SOCKET",
    "Access",
    "AccessControl",
    "Admitted",
    "Arrivals",
    "AuthGate",
    "BodyCheck",
    "Route",
    "Tenant",
    "hashed_key",
    "too_large",
    "too_slow",
    "without_credentials",
]
