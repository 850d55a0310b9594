"""The requests: chats of a size, equal for every router."""

from __future__ import annotations

import json
from random import Random

MODEL = "m"
PATH = "/v1/chat/completions"
# distinct chats of a size; every fourth begins another conversation
CHATS = 64
# The start of a last message that is new each time: the sender replaces it by a number.
STAMP = "@" * 20
_TURNS = 4
_MESSAGES = 31  # messages of a long conversation; the last is the user's
_WORDS = ("the", "of", "and", "to", "in", "that", "for", "was", "with", "not", "but", "are", "this", "have", "from")


def bodies(size: int, stream: bool = False, stamped: bool = False) -> list[bytes]:
    """Return chats of about `size` bytes: conversations of four turns, which share all but the last message."""
    chats = _chats(size)
    for chat in chats if stamped else ():
        chat[-1]["content"] = STAMP + chat[-1]["content"][len(STAMP) :]
    return [_body(chat, stream, 16) for chat in chats]


def one_token_streams(size: int) -> list[bytes]:
    """Return chats of about `size` bytes that stream one token each."""
    return [_body(chat, True, 1) for chat in _chats(size)]


def turns(tokens: int, count: int) -> list[bytes]:
    """Return turns of a conversation of about `tokens` tokens, which share all but the last message and stream one
    token.
    """
    random = Random(f"conversation {tokens}")
    share = tokens // _MESSAGES
    texts = [" ".join(random.choices(_WORDS, k=share)) for _ in range(_MESSAGES - 1)]
    roles = ("user", "assistant") * _MESSAGES
    before = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    asked = [_text(Random(f"turn {number}"), 200) for number in range(count)]
    return [_body([*before, {"role": "user", "content": text}], True, 1) for text in asked]


def _body(messages: list[dict[str, str]], stream: bool, max_tokens: int) -> bytes:
    chat = {"model": MODEL, "messages": messages, "max_tokens": max_tokens}
    return json.dumps(chat | ({"stream": True} if stream else {})).encode()


def _chats(size: int) -> list[list[dict[str, str]]]:
    made = []
    for number in range(CHATS):
        conversation = Random(f"{size} {number // _TURNS}")
        roles = ("user", "assistant") * 8
        share = max(size // 16, 16)
        messages = [{"role": role, "content": _text(conversation, share)} for role in roles[:-1]] if size > 4096 else []
        last = _text(Random(f"{size} turn {number}"), share if messages else size - 100)
        made.append([*messages, {"role": "user", "content": last}])
    return made


def _text(random: Random, size: int) -> str:
    text = " ".join(random.choices(_WORDS, k=size // 3))
    return text[:size]
