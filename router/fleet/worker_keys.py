"""API keys of workers, from the settings, a file, an environment variable or the user info of a URL.

The router sends a worker's key with its own requests, and with requests of clients as `proxy.worker_keys` defines. Keys
are never shown in logs, errors or answers.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from router.http.worker_url import authorization_of, key_in_environment, key_in_file
from router.settings import FleetSettings, KeySettings, WorkerSettings

log = structlog.get_logger()

_REFUSED = (401, 403)


class WorkerKey:
    """The API key of one worker.

    - `authorization`: the value of the header `Authorization`; None without a key.
    - `refused`: the status of the router's own requests that the worker refused, by path.
    """

    def __init__(self, name: str, given: WorkerSettings, fleet: FleetSettings | None = None) -> None:
        """Create the key of the worker `name`. A worker without a key of its own uses the key of `fleet`, if given."""
        self.name = name
        self.authorization: bytes | None = None
        self.headers: Mapping[str, str] = {}
        self.refused: dict[str, int] = {}
        self._complained = False
        self._source: KeySettings | None = None
        self.apply(name, given, fleet)

    def apply(self, name: str, given: WorkerSettings, fleet: FleetSettings | None) -> bool:
        """Apply settings. Return whether the key changed."""
        self.name = name
        self._source = given if given.has_key else fleet
        return self.read()

    def read(self) -> bool:
        """Read the key again, unless its file is unreadable. Return whether it changed."""
        try:
            key = key_of(self._source) if self._source is not None else ""
        except ValueError as error:
            if not self._complained:
                log.error("worker API key not readable, keeping the last one", worker=self.name, reason=str(error))
            self._complained = True
            return False
        self._complained = False
        authorization = authorization_of(key)
        if authorization == self.authorization:
            return False
        self.authorization = authorization
        self.headers = {} if authorization is None else {"Authorization": authorization.decode()}
        self.refused.clear()
        return True

    def record_status(self, path: str, status: int) -> None:
        """Record the status of a request of the router itself. The first refusal is logged."""
        if not self.refuses(status):
            if self.refused:
                self.refused.pop(path, None)
            return
        first = not self.refused
        self.refused[path] = status
        if first:
            log.warning("worker refuses the router's API key", worker=self.name, reason=self.problem)

    @property
    def problem(self) -> str | None:
        """The reason why the worker refuses the router; None while it does not."""
        if not self.refused:
            return None
        return self.refusal(", ".join(sorted(self.refused)), next(iter(self.refused.values())))

    def refuses(self, status: int) -> bool:
        return status in _REFUSED

    def refusal(self, path: str, status: int) -> str:
        """Return why a worker refuses, and the setting to change."""
        if self.authorization is None:
            return f"{path} returns {status}: the worker requires an API key. Set workers[].api_key or fleet.api_key"
        return f"{path} returns {status}: the worker refuses the key of workers[].api_key or fleet.api_key"


def key_of(source: KeySettings) -> str:
    """Return the key that settings name; empty without one. Raises ValueError, which begins with the field."""
    if source.api_key_file is not None:
        return key_in_file(source.api_key_file)
    if source.api_key_env is not None:
        return key_in_environment(source.api_key_env)
    return source.api_key.get_secret_value() if source.api_key is not None else ""
