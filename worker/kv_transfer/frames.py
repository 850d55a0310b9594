"""Frames between prefill and decode ranks: versioned, limited in size, and signed if a secret is set.

    magic "KVDF" | version u16 | flags u16 | payload length u32 | payload (msgpack) | HMAC-SHA256 (when signed)

Numbers are little-endian, also the page indices (i64) in the payload. Each start of a rank has a random instance name.
Every frame names the instance of its receiver, so that frames for a predecessor on the same port are dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvevents.decoding import msgpack_reader
from worker.kv_transfer.layout import Layout
from worker.kv_transfer.rooms import MAX_ROOM, MAX_TIMEOUT_S

MAX_FRAME = 16 << 20  # bytes: a prompt of two million pages
VERSION = 1

_MAGIC = b"KVDF"
_HEADER = struct.Struct("<4sHHI")
_SIGNED = 1
_SIGNATURE = hashlib.sha256().digest_size

_Instance = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Endpoint = Annotated[str, msgspec.Meta(pattern=r"^tcp://[^/?#\s]{1,250}:[0-9]{1,5}$")]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROOM)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class FrameError(Exception):
    """A frame that cannot be accepted. `kind` is malformed, oversized or unsigned."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A message between two ranks. `sender` and `to` are instances."""

    sender: _Instance
    to: _Instance


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A greeting, decode to prefill, once for each pair of ranks: identity, reply address and memory layout."""

    reply_to: _Endpoint
    engine: Annotated[str, msgspec.Meta(max_length=64)]
    engine_address: Annotated[bytes, msgspec.Meta(max_length=65536)]
    layout: Layout


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """An accepted greeting, prefill to decode."""


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """A rejected greeting, prefill to decode. After a restart, `about` is the previous instance and not the sender."""

    about: _Instance
    reason: _Text


class RoomRequest(Message, frozen=True, kw_only=True, tag="room"):
    """A request of decode for a room's pages.

    - `pages`: page indices of the destination, i64.
    - `prefix_pages`: pages at the prompt's start that decode already holds.
    - `aux_index`: destination of the aux item; `None`: another rank sends it.
    - `destinations`: decode ranks that request this room from the prefill rank.
    - `time_left`: seconds until the room's deadline.
    """

    reply_to: _Endpoint
    room: _Number
    generation: _Number
    pages: bytes
    prefix_pages: _Index
    aux_index: _Index | None
    dummy: bool
    destinations: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    time_left: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]

    def page_array(self) -> NDArray[np.int64]:
        """Return the page indices. Raises ValueError for bytes that are not i64."""
        return np.frombuffer(self.pages, "<i8").astype(np.int64)


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """A report of prefill to decode: all writes of this rank have landed."""

    room: _Number
    generation: _Number


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """A report, in either direction, that a room failed."""

    room: _Number
    generation: _Number
    reason: _Text


AnyMessage = Hello | Welcome | Refusal | RoomRequest | Done | Failure


class FrameCodec:
    """An encoder and decoder of frames. With a secret it signs frames, and rejects frames without its signature."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._decode: Callable[[bytes], AnyMessage] = msgpack_reader(AnyMessage)

    def encode(self, message: AnyMessage) -> bytes:
        """Encode a message. Raises ValueError above MAX_FRAME bytes."""
        payload = self._encoder.encode(message)
        frame = _HEADER.pack(_MAGIC, VERSION, _SIGNED if self._secret else 0, len(payload)) + payload
        if len(frame) + _SIGNATURE > MAX_FRAME:
            raise ValueError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME}")
        return frame + self._sign(frame) if self._secret else frame

    def decode(self, frame: bytes) -> AnyMessage:
        """Decode a frame. Raises FrameError for an invalid one."""
        if len(frame) > MAX_FRAME:
            raise FrameError("oversized", f"{len(frame)} bytes, the limit is {MAX_FRAME}")
        if len(frame) < _HEADER.size:
            raise FrameError("malformed", f"{len(frame)} bytes are too few for a frame")
        magic, version, flags, length = _HEADER.unpack_from(frame)
        if magic != _MAGIC or version != VERSION:
            raise FrameError("malformed", f"magic {magic!r} version {version}, expected {_MAGIC!r} version {VERSION}")
        signed = bool(flags & _SIGNED)
        if len(frame) != _HEADER.size + length + (_SIGNATURE if signed else 0):
            raise FrameError("malformed", f"{len(frame)} bytes do not fit a payload of {length}")
        end = _HEADER.size + length
        if signed != bool(self._secret) or (signed and not hmac.compare_digest(frame[end:], self._sign(frame[:end]))):
            raise FrameError("unsigned", "the secrets of the two sides differ")
        try:
            return self._decode(frame[_HEADER.size : end])
        except msgspec.DecodeError as error:
            raise FrameError("malformed", str(error)) from error

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")
