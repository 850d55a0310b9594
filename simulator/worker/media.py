"""Images, audio and video in a simulated worker: their tokens, the time to encode them, and a cache of encoded items.

An encode worker answers with the parameters by which others fetch its items (vLLM's `ec_transfer_params`). Another
worker encodes only the items for which its request has none. No bytes are moved.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from simulator.worker.metrics import LABELS
from simulator.worker.protocol import ApiError, ChatRequest, MediaPart, Message, TextPart
from simulator.worker.settings import SimulatedWorkerSettings

# An item is computed as this number of repetitions of its name, each of several tokens.
_REPETITIONS = 8


class MediaEncoder:
    """The encoder of a worker, which encodes one item after the other and keeps the last ones."""

    def __init__(self, settings: SimulatedWorkerSettings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._encoded: OrderedDict[str, None] = OrderedDict()
        self._busy = asyncio.Lock()
        items = Counter(
            "simulated:media_items", "Media items, by where they were encoded", (*LABELS, "result"), registry=registry
        )
        self._items = {
            result: items.labels(settings.model, "0", result) for result in ("encoded", "cached", "received")
        }

    async def answer(self, body: ChatRequest) -> dict[str, Any]:
        """Answer a chat as an encode worker does: with the parameters of its items. Raises ApiError without any."""
        names = [item_name(part) for part in media_parts(body.messages)]
        if not names:
            raise ApiError(HTTPStatus.BAD_REQUEST, "An encode worker answers only chats with media.", "messages")
        for name in names:
            await self._encode(name)
        peer = {"peer_host": self._settings.host, "peer_port": self._settings.port, "size_bytes": 4096}
        message = {"role": "assistant", "content": ""}
        return {
            "object": "chat.completion",
            "model": body.model or self._settings.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "ec_transfer_params": dict.fromkeys(names, peer),
        }

    async def need(self, body: ChatRequest) -> None:
        """Encode the items of a chat that no encode worker has encoded."""
        for part in media_parts(body.messages):
            name = item_name(part)
            if name in (body.ec_transfer_params or {}):
                self._items["received"].inc()
            else:
                await self._encode(name)

    async def _encode(self, name: str) -> None:
        async with self._busy:
            if name in self._encoded:
                self._encoded.move_to_end(name)
                self._items["cached"].inc()
                return
            await asyncio.sleep(self._settings.encode_s_per_item)
            self._items["encoded"].inc()
            self._encoded[name] = None
            while len(self._encoded) > self._settings.encoder_items:
                self._encoded.popitem(last=False)


def media_parts(messages: list[Message]) -> Iterator[MediaPart]:
    """Yield the media items of a conversation."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, MediaPart):
                yield part


def item_name(part: MediaPart) -> str:
    """Return the engine's name for an item: a hash of its content."""
    content = part.model_dump()[part.type]
    return blake2b(str(content).encode(), digest_size=16).hexdigest()


def with_items_as_text(messages: list[Message]) -> list[Message]:
    """Return a conversation with a text in place of each media item, so that the tokenizer can read it."""

    def as_text(part: TextPart | MediaPart) -> TextPart:
        return TextPart(type="text", text=item_name(part) * _REPETITIONS) if isinstance(part, MediaPart) else part

    return [
        message.model_copy(update={"content": [as_text(part) for part in message.content]})
        if isinstance(message.content, list)
        else message
        for message in messages
    ]
