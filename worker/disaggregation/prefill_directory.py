"""A decode rank asks bootstrap services where prefill ranks are: one thread for each service that is being asked, so
that one that does not answer holds back only its own rooms."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from worker.disaggregation.bootstrap_client import BootstrapClient, BootstrapError
from worker.disaggregation.registry import PrefillRanks

logger = logging.getLogger(__name__)

ASK_S = 10.0  # then whoever still wants to know asks again

Answer = PrefillRanks | BootstrapError | TimeoutError


class PrefillDirectory:
    """`found` gets each answer, in the thread that asked."""

    def __init__(self, token: str, found: Callable[[str, Answer], None]) -> None:
        self._token = token
        self._found = found
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Thread] = {}

    def ask(self, address: str) -> None:
        """Find the ranks of the prefill with this bootstrap address, unless that is under way."""
        with self._lock:
            if address not in self._asking and not self._stop.is_set():
                thread = threading.Thread(target=self._ask, args=[address], name=f"kv-bootstrap {address}", daemon=True)
                self._asking[address] = thread
                thread.start()

    def close(self) -> None:
        """End the threads, at most one attempt later."""
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
