"""The request recorder: requests as a trace in Mooncake's format for listeners. It has lengths and hashes, never text.

A line is written for each prompt when its request ends:

    timestamp        milliseconds since the recording began
    input_length, output_length   tokens; output_length is 0 if the response has no usage
    hash_ids         one per block of the prompt, the last of which may be partial; equal ids mean equal prefixes
    session_id       equal for the requests of one session
    model, worker, cached_tokens, ttft_ms, failed   the outcome

Every recording has a random key, which is never disclosed. So ids of two recordings cannot be compared, and a known
prompt cannot be searched in a recording.

If several processes share a port, the process that serves a listener also reads the others' requests. They receive the
recording's key and its start, so that equal prefixes have equal ids in all processes. All processes use the machine's
clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import aiohttp
import msgspec
import structlog
from starlette.requests import Request

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from kvevents.decoding import read_json
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.http.client import refuse_redirects
from router.sharing.worker_processes import WorkerProcesses

MAX_LISTENERS = 4
MAX_WAITING = 10_000  # lines that wait for a listener; further lines are dropped
DEFAULT_BLOCK_TOKENS = 512
HEARTBEAT_SECONDS = 1.0

_ID_BYTES = 8
_ID_BITS = 53  # larger integers are not exact in every JSON parser

Line = dict[str, Any]
log = structlog.get_logger()
_RECORDING = "x-kvrouter-recording"
_AGAIN_SECONDS = 1.0
_SILENCE = 10.0
_MAX_LINE = 1 << 24


class Recording(msgspec.Struct, frozen=True):
    """The key of a recording's ids, and its start by `time.monotonic`."""

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    key: bytes = msgspec.field(default_factory=lambda: token_bytes(32))
    began: float = msgspec.field(default_factory=time.monotonic)


class _Missing(msgspec.Struct):
    dropped: int
    unknown: int


class RecordingRequest:
    """A request that began while the recorder had listeners."""

    def __init__(self, stream: RequestRecorder, prompt: RoutedRequest, arrived: float) -> None:
        self._stream = stream
        self._prompt = prompt
        self._arrived = arrived

    def ended(self, worker: str | None, first_byte_at: float | None, usage: Usage | None, failed: bool) -> None:
        """Record the end of the request; times are by `time.monotonic`."""
        ttft = None if first_byte_at is None else round((first_byte_at - self._arrived) * 1000, 1)
        outcome: Line = {"worker": worker, "ttft_ms": ttft, "cached_tokens": usage.cached if usage else None}
        fields = {name: value for name, value in outcome.items() if value is not None}
        if failed:
            fields["failed"] = True
        self._stream.record(self._prompt, self._arrived, usage.completion if usage else 0, fields)


class RequestRecorder:
    """The recorder of requests. A request checks only `listening`; `on_listening` is called when that changes."""

    def __init__(self, on_listening: Callable[[bool], None] = lambda _: None) -> None:
        self._listeners: list[Listener] = []
        self._on_listening = on_listening
        self._ended = False
        self.listening = False

    @property
    def full(self) -> bool:
        """True if the maximum number of listeners is reached."""
        return len(self._listeners) >= MAX_LISTENERS

    def began(self, prompt: RoutedRequest, arrived: float) -> RecordingRequest:
        """Return the record of a request that was complete at `arrived` by `time.monotonic`."""
        return RecordingRequest(self, prompt, arrived)

    def record(self, prompt: RoutedRequest, arrived: float, output: int, outcome: Line) -> None:
        """Send an ended request to all listeners."""
        for listener in self._listeners:
            listener.record(prompt, arrived, output, outcome)

    async def lines(
        self, recording: Recording, others: Callable[[Listener], Coroutine[None, None, None]] | None = None
    ) -> AsyncIterator[bytes]:
        """Yield lines of JSON for the requests from now on, also those of `others` until it is cancelled.

        A line without a timestamp counts missing requests: `dropped` lines that a slow reader missed, and `unknown`
        requests without tokens.
        """
        with self._listening(Listener(recording)) as listener:
            reading = asyncio.create_task(others(listener)) if others else None
            try:
                yield _line({"block_tokens": recording.block_tokens, **listener.missing()})
                while not self._ended:
                    yield await listener.next()
            finally:
                if reading is not None:
                    reading.cancel()
                    await asyncio.wait((reading,))

    def end(self) -> None:
        """Disconnect all listeners."""
        self._ended = True
        for listener in self._listeners:
            listener.wake()

    @contextmanager
    def _listening(self, listener: Listener) -> Iterator[Listener]:
        self._listeners.append(listener)
        self._update_listening()
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            self._update_listening()

    def _update_listening(self) -> None:
        self.listening = bool(self._listeners)
        self._on_listening(self.listening)


class Listener:
    """A reader of a recording, and the lines that wait for it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._key = recording.key
        self._block_tokens = recording.block_tokens
        self._began = recording.began
        self._waiting: list[bytes] = []
        self._news = asyncio.Event()
        self._dropped = self._unknown = 0
        self._missing_elsewhere: dict[int, _Missing] = {}

    def record(self, prompt: RoutedRequest, arrived: float, output: int, outcome: Line) -> None:
        prompts = prompt.identities
        if not prompts:
            self._unknown += 1
        for packed in prompts if arrived >= self._began else ():
            line: Line = {
                "timestamp": round((arrived - self._began) * 1000),
                "input_length": len(packed),
                "output_length": output // len(prompts),
                "hash_ids": self._ids(prompt, packed),
            }
            if prompt.session is not None:
                line["session_id"] = f"{self._hash(prompt.session.encode(), b'session'):x}"
            if prompt.name:
                line["model"] = prompt.name
            self._add(_line(line | outcome))

    def record_line(self, process: int, line: bytes) -> None:
        """Add a line of another process. Raises ValueError if it is invalid."""
        if b'"timestamp"' in line:
            self._add(line)
        else:
            self._missing_elsewhere[process] = read_json(line, _Missing)

    def missing(self) -> Line:
        peer_load = self._missing_elsewhere.values()
        return {
            "dropped": self._dropped + sum(each.dropped for each in peer_load),
            "unknown": self._unknown + sum(each.unknown for each in peer_load),
        }

    def _add(self, line: bytes) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        self._waiting.append(line)
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def next(self) -> bytes:
        """Return the waiting lines; after a while without any, the number of missing ones."""
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return _line(self.missing())
        self._news.clear()
        lines, self._waiting = self._waiting, []
        return b"".join([*lines, _line(self.missing())])

    def _ids(self, prompt: RoutedRequest, packed: PackedPrompt) -> list[int]:
        """Return the ids of a prompt's blocks, each of all tokens up to its end, the model and the cache salt."""
        known = self._digest(msgspec.msgpack.encode((prompt.name, prompt.cache_salt)), b"root")
        step, tokens, ids = self._block_tokens * TOKEN_BYTES, packed.tokens, []
        for start in range(0, len(tokens), step):
            known = self._digest(tokens[start : start + step], known)
            ids.append(_number(known))
        return ids

    def _hash(self, data: bytes, before: bytes) -> int:
        return _number(self._digest(data, before))

    def _digest(self, data: bytes, before: bytes) -> bytes:
        return blake2b(before + data, digest_size=_ID_BYTES, key=self._key).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest) >> (8 * _ID_BYTES - _ID_BITS)


def _line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def recording_of(request: Request, worker_processes: WorkerProcesses | None) -> Recording | None:
    """Return the recording that another process asks for; None for any other client."""
    if worker_processes is None or (request.scope.get("server") or ("",))[0] != str(worker_processes.path):
        return None
    sent = request.headers.get(_RECORDING)
    return read_json(sent, Recording) if sent else None


class OtherProcesses:
    """The reader of other processes' requests for the listeners of this one."""

    def __init__(self, worker_processes: WorkerProcesses, token: str) -> None:
        self._worker_processes = worker_processes
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def read(self, listener: Listener) -> None:
        """Read from all other processes until it is cancelled. A process that restarts is read again."""
        async with asyncio.TaskGroup() as tasks:
            for number in self._worker_processes.others:
                tasks.create_task(self._read(number, listener))

    async def _read(self, number: int, listener: Listener) -> None:
        headers = self._headers | {_RECORDING: msgspec.json.encode(listener.recording).decode()}
        url = f"http://sibling/requests?block_tokens={listener.recording.block_tokens}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        while True:
            try:
                async with (
                    aiohttp.ClientSession(
                        middlewares=(refuse_redirects,),
                        connector=aiohttp.UnixConnector(str(self._worker_processes.path_of(number))),
                        timeout=timeout,
                        read_bufsize=_MAX_LINE,
                    ) as session,
                    session.get(url, headers=headers) as response,
                ):
                    if response.status == 200:
                        async for line in response.content:
                            listener.record_line(number, line)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                log.debug(
                    "cannot read the requests of a process", process=number, reason=str(error) or type(error).__name__
                )
            await asyncio.sleep(_AGAIN_SECONDS)
