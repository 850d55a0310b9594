"""The cost of checking that a body has one meaning: make bench-body-check.

Each side checks that a chat is a JSON object that all parsers read alike, and reads the fields for routing by load. The
sides take turns: our native pass; msgspec with our strict parser for rare fields; msgspec alone, without checks. Two
more sides also read the chat for routing by its prompt: in the same native pass, and by msgspec after it. The output is
medians of processor time, in microseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

from indexer.native import native_core
from router.apis.body_fields import ModelFields
from router.apis.fields import read_body
from router.apis.openai_requests import decode_chat, usual_chat
from router.auth.bodies import BodyCheck, check_media, read_object
from router.settings import LimitSettings

_ROUNDS = 300
_CALLS = 20
_LIMITS = LimitSettings()
_CHECK = BodyCheck(_LIMITS)


def _chat(size: int) -> bytes:
    text = "You are brief and answer in one sentence. "
    messages = [
        {"role": role, "content": text * 6} for role in ("system", "user", "assistant") for _ in range(size // 768)
    ]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 16, "stream": True}).encode()


def _checked(body: bytes) -> None:
    named = _CHECK.model_body(body)
    assert named is not None
    read_body(named, ModelFields)


def _strict(body: bytes) -> None:
    read_object(body, _LIMITS.values)
    read_body(body, ModelFields)


def _unchecked(body: bytes) -> None:
    read_body(body, ModelFields)


def _chat_in_one_pass(body: bytes) -> None:
    known = _CHECK.usual_chat(body)
    assert isinstance(known, tuple)
    usual_chat(known)


def _chat_in_two(body: bytes) -> None:
    _CHECK.model_body(body)
    check_media(body, _LIMITS)
    decode_chat(body)


_SIDES: dict[str, Callable[[bytes], None]] = {
    "ours": _checked,
    "strict": _strict,
    "unchecked": _unchecked,
    "chat": _chat_in_one_pass,
    "chat, two": _chat_in_two,
}


def main() -> None:
    """Measure all sides."""
    if native_core() is None:
        raise SystemExit("the native core is missing: run make native")
    print(f"{'body':>8}" + "".join(f"{side:>12}" for side in _SIDES) + f"{'strict/ours':>14}{'two/one':>10}")
    for size in (1024, 65536):
        body = _chat(size)
        times: dict[str, list[float]] = {side: [] for side in _SIDES}
        for _ in range(_ROUNDS):
            for side, read in _SIDES.items():
                began = time.process_time_ns()
                for _ in range(_CALLS):
                    read(body)
                times[side].append((time.process_time_ns() - began) / _CALLS / 1000)
        cost = {side: median(taken) for side, taken in times.items()}
        row = "".join(f"{cost[side]:12.1f}" for side in _SIDES)
        ratios = f"{cost['strict'] / cost['ours']:14.1f}{cost['chat, two'] / cost['chat']:10.1f}"
        print(f"{len(body) / 1024:5.0f} KB{row}{ratios}")


if __name__ == "__main__":
    main()
