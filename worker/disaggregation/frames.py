"""The frames that prefill and decode ranks exchange: versioned, bounded, and signed where a secret is set.

    magic "KVDF" | version u16 | flags u16 | payload length u32 | payload (msgpack) | HMAC-SHA256 (when signed)

Numbers are little-endian, page indices in the payload too (i64). A rank names itself by its instance, random for each
start, and every frame names the instance it is meant for: what was meant for a predecessor on the same port is dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from worker.disaggregation.layout import Layout
from worker.disaggregation.rooms import MAX_ROOM, MAX_TIMEOUT_S

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
    """A frame that can't be accepted; `kind` is malformed, oversized or unsigned."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`sender` and `to` are instances."""

    sender: _Instance
    to: _Instance


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Decode to prefill, once for each pair of ranks: who I am, where to answer, where my pages are."""

    reply_to: _Endpoint
    engine: Annotated[str, msgspec.Meta(max_length=64)]
    engine_address: Annotated[bytes, msgspec.Meta(max_length=65536)]
    layout: Layout


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Prefill to decode: rooms may follow."""


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """Prefill to decode: no room will work. `about`: the instance that was meant, after a restart not the sender."""

    about: _Instance
    reason: _Text


class RoomRequest(Message, frozen=True, kw_only=True, tag="room"):
    """Decode to prefill: these pages wait for this room.

    `pages`: page indices, i64. `prefix_pages`: pages at the prompt's start that decode has already. `aux_index`: None
    when another rank sends it. `destinations`: decode ranks that this prefill rank hears from. `time_left`: seconds.
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
        """Raises ValueError for bytes that are not i64."""
        return np.frombuffer(self.pages, "<i8").astype(np.int64)


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Prefill to decode: everything that this rank sends has landed."""

    room: _Number
    generation: _Number


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """Either way: the room failed."""

    room: _Number
    generation: _Number
    reason: _Text


AnyMessage = Hello | Welcome | Refusal | RoomRequest | Done | Failure


class FrameCodec:
    """Writes and reads frames; with a secret it signs them, and accepts none that it did not sign alike."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

    def encode(self, message: AnyMessage) -> bytes:
        """Raises ValueError for a message over the bound."""
        payload = self._encoder.encode(message)
        frame = _HEADER.pack(_MAGIC, VERSION, _SIGNED if self._secret else 0, len(payload)) + payload
        if len(frame) + _SIGNATURE > MAX_FRAME:
            raise ValueError(f"a frame of {len(frame)} bytes is over the bound of {MAX_FRAME}")
        return frame + self._sign(frame) if self._secret else frame

    def decode(self, frame: bytes) -> AnyMessage:
        """Raises FrameError for anything but a well-formed frame."""
        if len(frame) > MAX_FRAME:
            raise FrameError("oversized", f"{len(frame)} bytes, the bound is {MAX_FRAME}")
        if len(frame) < _HEADER.size:
            raise FrameError("malformed", f"{len(frame)} bytes are no frame")
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
            return self._decoder.decode(frame[_HEADER.size : end])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError("malformed", str(error)) from error

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")
