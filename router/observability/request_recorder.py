"""The requests that pass, as a trace in Mooncake's format to those who record: lengths and hashes, never text.

A line is made of each prompt when its request ends:

    timestamp        milliseconds since the recording began
    input_length, output_length   tokens; output_length is 0 when the answer did not say
    hash_ids         one for each block of the prompt, the last of which may be partial; equal ids mean equal prefixes
    session_id       the same for the requests of one session
    model, worker, cached_tokens, ttft_ms, failed   what came of it

Every recording has a random key of its own, which is never disclosed: ids of two recordings have nothing in common, and
knowing a prompt does not reveal whether it was asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import msgspec

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.usage import Usage
from router.routing.routed_prompt import RoutedPrompt

MAX_LISTENERS = 4
MAX_WAITING = 10_000  # lines of a listener that does not read; more are dropped
DEFAULT_BLOCK_TOKENS = 512
HEARTBEAT_SECONDS = 1.0

_ID_BYTES = 8
_ID_BITS = 53  # what every reader of JSON reads exactly

Line = dict[str, Any]


class Recording(msgspec.Struct, frozen=True):
    """What the ids of a recording are made with, and when it began, of `time.monotonic`."""

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    key: bytes = msgspec.field(default_factory=lambda: token_bytes(32))
    began: float = msgspec.field(default_factory=time.monotonic)


class _Missing(msgspec.Struct):
    dropped: int
    unknown: int


class RecordingRequest:
    """A request that was read while somebody records. `ended` tells of it."""

    def __init__(self, stream: RequestRecorder, prompt: RoutedPrompt, arrived: float) -> None:
        self._stream = stream
        self._prompt = prompt
        self._arrived = arrived

    def ended(self, worker: str | None, first_byte_at: float | None, usage: Usage | None, failed: bool) -> None:
        """It is over; times are of `time.monotonic`."""
        ttft = None if first_byte_at is None else round((first_byte_at - self._arrived) * 1000, 1)
        outcome: Line = {"worker": worker, "ttft_ms": ttft, "cached_tokens": usage.cached if usage else None}
        fields = {name: value for name, value in outcome.items() if value is not None}
        if failed:
            fields["failed"] = True
        self._stream.tell(self._prompt, self._arrived, usage.completion if usage else 0, fields)


class RequestRecorder:
    """Tells listeners of the requests that pass.

    `listening`: whether there are any, which is all that a request asks while nothing is recorded. `on_listening` is
    called with it when it changes.
    """

    def __init__(self, on_listening: Callable[[bool], None] = lambda _: None) -> None:
        self._listeners: list[Listener] = []
        self._on_listening = on_listening
        self._ended = False
        self.listening = False

    @property
    def full(self) -> bool:
        """Whether there are as many listeners as there may be."""
        return len(self._listeners) >= MAX_LISTENERS

    def began(self, prompt: RoutedPrompt, arrived: float) -> RecordingRequest:
        """A request was read, which arrived at that time of `time.monotonic`."""
        return RecordingRequest(self, prompt, arrived)

    def tell(self, prompt: RoutedPrompt, arrived: float, output: int, outcome: Line) -> None:
        """A request ended."""
        for listener in self._listeners:
            listener.take(prompt, arrived, output, outcome)

    async def lines(
        self, recording: Recording, others: Callable[[Listener], Coroutine[None, None, None]] | None = None
    ) -> AsyncIterator[bytes]:
        """What passes from now on, as lines of JSON, with lines in between that tell what is missing.

        A line without a timestamp is such a one: `dropped` are lines that a slow reader missed, `unknown` requests
        whose tokens are not known here. `others` reads what other processes tell, until it is cancelled.
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
        """Let all listeners go."""
        self._ended = True
        for listener in self._listeners:
            listener.wake()

    @contextmanager
    def _listening(self, listener: Listener) -> Iterator[Listener]:
        self._listeners.append(listener)
        self._tell_whether_listening()
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            self._tell_whether_listening()

    def _tell_whether_listening(self) -> None:
        self.listening = bool(self._listeners)
        self._on_listening(self.listening)


class Listener:
    """Who reads a recording, and the lines that wait for it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._key = recording.key
        self._block_tokens = recording.block_tokens
        self._began = recording.began
        self._waiting: list[bytes] = []
        self._news = asyncio.Event()
        self._dropped = self._unknown = 0
        self._missing_elsewhere: dict[int, _Missing] = {}

    def take(self, prompt: RoutedPrompt, arrived: float, output: int, outcome: Line) -> None:
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

    def take_from(self, process: int, line: bytes) -> None:
        """A line that another process tells. Raises ValueError when it is none."""
        if b'"timestamp"' in line:
            self._add(line)
        else:
            self._missing_elsewhere[process] = msgspec.json.decode(line, type=_Missing)

    def missing(self) -> Line:
        """How much this listener missed."""
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
        """The lines that wait, or what is missing when there were none for a while."""
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return _line(self.missing())
        self._news.clear()
        lines, self._waiting = self._waiting, []
        return b"".join([*lines, _line(self.missing())])

    def _ids(self, prompt: RoutedPrompt, packed: PackedPrompt) -> list[int]:
        """Each block's id stands for all tokens up to its end, and for what keeps prompts apart beside them."""
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
