"""What workers want to be shown: API keys, from the settings, a file, the environment or a URL's user info.

A key is sent with all that the router asks of a worker itself, and with requests of clients as `proxy.worker_keys`
says. It is never shown: neither in logs and errors nor over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from router.http.worker_url import authorization_of, key_in_environment, key_in_file
from router.settings import FleetSettings, KeySettings, WorkerSettings

log = structlog.get_logger()

_REFUSED = (401, 403)


class WorkerKey:
    """One worker's key.

    `authorization`: the value of the header; None without a key. `headers`: the same for what the router asks itself.
    `refused`: with what status it refused to answer the router itself, by the path that was asked.
    """

    def __init__(self, name: str, given: WorkerSettings, fleet: FleetSettings | None = None) -> None:
        """`name`: the worker's. `fleet`: where the key of all is, for a worker that has none of its own."""
        self.name = name
        self.authorization: bytes | None = None
        self.headers: Mapping[str, str] = {}
        self.refused: dict[str, int] = {}
        self._complained = False
        self._source: KeySettings | None = None
        self.settle(name, given, fleet)

    def settle(self, name: str, given: WorkerSettings, fleet: FleetSettings | None) -> bool:
        """Its settings are these. Whether the key is another one."""
        self.name = name
        self._source = given if given.has_key else fleet
        return self.read()

    def read(self) -> bool:
        """Read the key again: files change. Whether it is another one; one that cannot be read stays as it was."""
        try:
            key = key_of(self._source) if self._source is not None else ""
        except ValueError as error:
            if not self._complained:
                log.error("API key of a worker not read", worker=self.name, reason=str(error))
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

    def answered(self, path: str, status: int) -> None:
        """The worker answered a question of the router's own with this status: a refusal is logged once."""
        if not self.refuses(status):
            if self.refused:
                self.refused.pop(path, None)
            return
        first = not self.refused
        self.refused[path] = status
        if first:
            log.warning("a worker refuses the router", worker=self.name, reason=self.problem)

    @property
    def problem(self) -> str | None:
        """Why the worker refuses the router; None while it does not."""
        if not self.refused:
            return None
        return self.refusal(", ".join(sorted(self.refused)), next(iter(self.refused.values())))

    def refuses(self, status: int) -> bool:
        """Whether such an answer is about the key."""
        return status in _REFUSED

    def refusal(self, path: str, status: int) -> str:
        """Why a worker refuses, and the setting to change."""
        if self.authorization is None:
            return f"{path} is answered with {status}: it wants an API key. Set workers[].api_key, or fleet.api_key"
        return f"{path} is answered with {status}: it does not take the key of workers[].api_key or fleet.api_key"


def key_of(source: KeySettings) -> str:
    """The key that settings name; empty without one. Raises ValueError, which begins with the field."""
    if source.api_key_file is not None:
        return key_in_file(source.api_key_file)
    if source.api_key_env is not None:
        return key_in_environment(source.api_key_env)
    return source.api_key.get_secret_value() if source.api_key is not None else ""
