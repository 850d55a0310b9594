"""The client of the bootstrap service: registration of a prefill rank, and a directory of prefill workers."""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from kvevents.decoding import read_json
from kvevents.endpoints import split_host_port
from worker.kv_transfer.registry import PrefillRanks, Registration, check_ranks, registration_body

logger = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
MAX_ANSWER = 4 << 20


class BootstrapError(Exception):
    """A refusal by the service. Only temporary problems are retried until the deadline, never a refusal."""


class _NotNow(Exception):  # noqa: N818
    """A temporary problem that a retry may solve."""


class BootstrapClient:
    """A client of the service at `address` (`host:port`). Raises ValueError for an invalid address.

    Calls block until they succeed, `stop` is set, or the deadline (`time.monotonic()`) passes.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address
        self._host, self._port = split_host_port(address, "bootstrap_addr")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def register(self, registration: Registration, deadline: float, stop: threading.Event) -> None:
        """Register a rank. Raises BootstrapError when refused, and TimeoutError at the deadline or when stopped."""
        self._retry("PUT", "/route", registration_body(registration), deadline, stop)

    def deregister(self, registration: Registration, deadline: float) -> None:
        """Deregister a rank in one attempt. If it fails, the rank expires without heartbeats."""
        rank = registration.rank
        query = f"dp_rank={rank.dp}&cp_rank={rank.cp}&tp_rank={rank.tp}&pp_rank={rank.pp}"
        try:
            self._ask("DELETE", f"/route?{query}&instance={registration.instance}", b"", deadline)
        except (BootstrapError, _NotNow) as error:
            logger.info("could not deregister from %s: %s", self.address, error)

    def ranks(self, deadline: float, stop: threading.Event) -> PrefillRanks:
        """Return every rank of the prefill as soon as all are registered. Raises BootstrapError and TimeoutError."""
        data = self._retry("GET", "/ranks", b"", deadline, stop)
        try:
            answer = read_json(data, PrefillRanks)
            check_ranks(answer)
        except (msgspec.DecodeError, ValueError) as error:
            raise BootstrapError(f"bootstrap {self.address} sent an invalid answer: {error}") from error
        return answer

    def _retry(self, method: str, path: str, body: bytes, deadline: float, stop: threading.Event) -> bytes:
        problem = "no time was left"
        for pause in _backoff():
            if (left := deadline - time.monotonic()) <= 0:
                break
            try:
                return self._ask(method, path, body, deadline)
            except _NotNow as error:
                problem = str(error)
            if stop.wait(min(pause, left)):
                break
        raise TimeoutError(f"bootstrap {self.address} did not answer in time: {problem}")

    def _ask(self, method: str, path: str, body: bytes, deadline: float) -> bytes:
        timeout = max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - time.monotonic()))
        end = time.monotonic() + timeout
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, path, body or None, self._headers)
            response = connection.getresponse()
            data = b""
            while part := response.read1(65536):
                data += part
                if len(data) > MAX_ANSWER or time.monotonic() > end:
                    raise BootstrapError(f"bootstrap {self.address} sent an answer that is too long or too slow")
        except (OSError, http.client.HTTPException) as error:
            raise _NotNow(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if response.status == 200:
            return data
        text = f"{response.status} {data[:500].decode(errors='replace')}"
        if response.status >= 500 or response.status == 409:
            raise _NotNow(text)
        raise BootstrapError(f"bootstrap {self.address} answered {text}")


def _backoff() -> Iterator[float]:
    pause = FIRST_BACKOFF_S
    while True:
        yield pause * random.uniform(0.75, 1.25)
        pause = min(2 * pause, MAX_BACKOFF_S)


class Registrar:
    """A registration of a prefill rank, repeated every heartbeat, also for a restarted service, until `close`."""

    def __init__(self, client: BootstrapClient, registration: Registration, heartbeat_s: float) -> None:
        self.registered = threading.Event()
        self.error = ""  # why it is not registered
        self._client = client
        self._registration = registration
        self._heartbeat_s = heartbeat_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-registrar", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deregister the rank if it is registered, and end the thread."""
        self._stop.set()
        self._thread.join()
        if self.registered.is_set():
            self._client.deregister(self._registration, time.monotonic() + 1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._client.register(self._registration, time.monotonic() + self._heartbeat_s, self._stop)
                self.registered.set()
                self.error = ""
            except TimeoutError as error:
                self._note(error)
                continue
            except BootstrapError as error:
                self._note(error)
            self._stop.wait(self._heartbeat_s)

    def _note(self, error: Exception) -> None:
        if not self.error and not self._stop.is_set():
            logger.warning("not registered: %s", error)
        self.error = str(error)


ASK_S = 10.0  # seconds of one search; rooms that still wait start the next

Answer = PrefillRanks | BootstrapError | TimeoutError


class PrefillDirectory:
    """Searches for ranks of prefill instances, in a thread per address, from which `found` receives each result."""

    def __init__(self, token: str, found: Callable[[str, Answer], None]) -> None:
        self._token = token
        self._found = found
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Thread] = {}

    def ask(self, address: str) -> None:
        """Start a search for the ranks behind a bootstrap address, unless one is running."""
        with self._lock:
            if address not in self._asking and not self._stop.is_set():
                thread = threading.Thread(target=self._ask, args=[address], name=f"kv-bootstrap {address}", daemon=True)
                self._asking[address] = thread
                thread.start()

    def close(self) -> None:
        """End the threads after their current attempt."""
        self._stop.set()
        with self._lock:
            threads = list(self._asking.values())
        for thread in threads:
            thread.join()

    def _ask(self, address: str) -> None:
        answer: Answer
        try:
            answer = BootstrapClient(address, self._token).ranks(time.monotonic() + ASK_S, self._stop)
        except (BootstrapError, TimeoutError) as error:
            answer = error
        with self._lock:
            del self._asking[address]
        if not self._stop.is_set():
            self._found(address, answer)
