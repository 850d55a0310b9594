"""The reading of a request's SLO, from its headers and from its service level.

    x-slo-ttft-ms, x-llm-d-slo-ttft-ms    TTFT in milliseconds
    x-slo-tpot-ms, x-llm-d-slo-tpot-ms    TPOT in milliseconds
    x-kvrouter-service-level              the name of a service level in the settings

The first names are those of the Gateway API's inference extension, the second those of llm-d. Headers override the
service level. The service level of the request overrides that of its tenant, which overrides that of its model.
"""

from __future__ import annotations

from http_api.errors import RequestError
from router.http.headers import HeaderItems, number_of
from router.prediction.slo import SLO
from router.settings import ServiceLevelSettings, Settings, WhenLate

SERVICE_LEVEL_HEADER = b"x-kvrouter-service-level"
# If a request has several of these headers, the last counts.
_TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
_TPOT_HEADERS = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
SLO_HEADERS = frozenset({SERVICE_LEVEL_HEADER, *_TTFT_HEADERS, *_TPOT_HEADERS})
_NO_LEVEL = ServiceLevelSettings()


class ServiceLevels:
    """The service levels in the settings, by name, and the defaults of tenants and models."""

    def __init__(self, settings: Settings) -> None:
        self.named = settings.service_levels
        self._of_tenant = {name: each.service_level for name, each in settings.tenants.named.items()}
        self._of_model = {name: each.service_level for name, each in settings.models.items()}

    @classmethod
    def from_settings(cls, settings: Settings) -> ServiceLevels | None:
        """Return the service levels of the settings; None if it has no service levels."""
        return cls(settings) if settings.service_levels else None

    def default(self, tenant: str, model: str | None) -> str | None:
        """Return the name of the service level of a request that names no other; None if there is no default."""
        return self._of_tenant.get(tenant) or self._of_model.get(model or "")


def read_slo(
    headers: HeaderItems, levels: ServiceLevels | None, tenant: str, model: str | None, arrived: float
) -> SLO | None:
    """Return a request's SLO, if it has one. `arrived`: by the router's clock. Raises RequestError (400)."""
    values = {name: value for name, value in headers if name in SLO_HEADERS}
    name = levels.default(tenant, model) if levels is not None else None
    level = _NO_LEVEL
    if (requested := values.get(SERVICE_LEVEL_HEADER)) is not None:
        name = _text(requested)
    if name is not None:
        level = _level_named(name, levels)
    ttft, tpot = _objective(values, _TTFT_HEADERS, level.ttft), _objective(values, _TPOT_HEADERS, level.tpot)
    if ttft is None and tpot is None:
        return None
    return SLO(ttft, tpot, arrived, name or "", level.when_late is WhenLate.REFUSE)


def _level_named(name: str, levels: ServiceLevels | None) -> ServiceLevelSettings:
    known = levels.named if levels is not None else {}
    if name not in known:
        header = _text(SERVICE_LEVEL_HEADER)
        among = (
            f"Send one of: {', '.join(sorted(known))}." if known else "No service level is configured: leave it out."
        )
        raise RequestError(f"{header} is {name[:64]!r}. {among}", param=header)
    return known[name]


def _objective(values: dict[bytes, bytes], names: tuple[bytes, ...], otherwise: float | None) -> float | None:
    """Return the seconds in the last of these headers, or `otherwise` without one. Raises RequestError (400)."""
    objective = otherwise
    for name in names:
        if (value := values.get(name)) is not None:
            milliseconds = number_of(value)
            if milliseconds is None:
                raise RequestError(
                    f"{_text(name)} is {_text(value)[:64]!r}. Send milliseconds, or leave it out.", param=_text(name)
                )
            if milliseconds:  # 0: no objective, as in llm-d
                objective = milliseconds / 1000
    return objective


def _text(value: bytes) -> str:
    return value.decode("latin-1")
