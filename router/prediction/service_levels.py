"""Service levels: what a request is promised of its first token and of those after it.

| header | unit | promises |
|---|---|---|
| `x-slo-ttft-ms`, `x-llm-d-slo-ttft-ms` | milliseconds | the first token |
| `x-slo-tpot-ms`, `x-llm-d-slo-tpot-ms` | milliseconds | each token after it |
| `x-kvrouter-service-level` | a name | what the class of this name in the settings does |

The first names are those of the Gateway API's inference extension, the second those that llm-d gave them since. What
headers promise goes before what a class does. The class that a request names goes before that of its tenant, and that
before its model's.
"""

from __future__ import annotations

from http_api.errors import RequestError
from router.http.headers import HeaderItems, number_of
from router.prediction.slo import SLO
from router.settings import ServiceLevelSettings, Settings, WhenLate

SERVICE_LEVEL_HEADER = b"x-kvrouter-service-level"
# The last of them that is there counts.
_TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
_TPOT_HEADERS = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
SLO_HEADERS = frozenset({SERVICE_LEVEL_HEADER, *_TTFT_HEADERS, *_TPOT_HEADERS})
_NO_LEVEL = ServiceLevelSettings()


class ServiceLevels:
    """The classes in the settings: by their names, and those of tenants and models."""

    def __init__(self, settings: Settings) -> None:
        self.named = settings.service_levels
        self._of_tenant = {name: each.service_level for name, each in settings.tenants.named.items()}
        self._of_model = {name: each.service_level for name, each in settings.models.items()}

    @classmethod
    def of(cls, settings: Settings) -> ServiceLevels | None:
        """None where there are no classes."""
        return cls(settings) if settings.service_levels else None

    def default(self, tenant: str, model: str | None) -> str | None:
        """The class of requests that name none."""
        return self._of_tenant.get(tenant) or self._of_model.get(model or "")


def read_slo(
    headers: HeaderItems, levels: ServiceLevels | None, tenant: str, model: str | None, arrived: float
) -> SLO | None:
    """What a request that `arrived` is promised; None where that is nothing. Raises RequestError (400)."""
    given = {name: value for name, value in headers if name in SLO_HEADERS}
    name = levels.default(tenant, model) if levels is not None else None
    level = _NO_LEVEL
    if (named := given.get(SERVICE_LEVEL_HEADER)) is not None:
        name = _text(named)
    if name is not None:
        level = _level_named(name, levels)
    ttft, tpot = _objective(given, _TTFT_HEADERS, level.ttft), _objective(given, _TPOT_HEADERS, level.tpot)
    if ttft is None and tpot is None:
        return None
    return SLO(ttft, tpot, arrived, name or "", level.when_late is WhenLate.REFUSE)


def _level_named(name: str, levels: ServiceLevels | None) -> ServiceLevelSettings:
    known = levels.named if levels is not None else {}
    if name not in known:
        header = _text(SERVICE_LEVEL_HEADER)
        among = f"Send one of: {', '.join(sorted(known))}." if known else "There are none: leave it out."
        raise RequestError(f"{header} is {name[:64]!r}. {among}", param=header)
    return known[name]


def _objective(given: dict[bytes, bytes], names: tuple[bytes, ...], otherwise: float | None) -> float | None:
    """Seconds, of the last of these headers that is there."""
    objective = otherwise
    for name in names:
        if (value := given.get(name)) is not None:
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
