"""Encoding of event batches in the dialects of vLLM's, SGLang's and Mooncake's publishers.

`decode_batch` reads all of them, and so do the decoders of the engines' matching releases.
"""

from __future__ import annotations

import msgspec

from kvevents.dialects import DIALECTS, WireForm
from kvevents.events import EventBatch

_encode = msgspec.msgpack.Encoder().encode


def encode_batch(batch: EventBatch, form: WireForm = WireForm.VLLM_MAPS) -> bytes:
    """Encode a batch as msgpack `[ts, events, dp_rank]` in the given dialect."""
    write = DIALECTS[form].write
    return _encode([batch.ts, [write(event, batch.dp_rank) for event in batch.events], batch.dp_rank])
