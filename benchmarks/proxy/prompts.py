"""What is asked: chats of a size, the same for every router."""

from __future__ import annotations

import json
from random import Random

MODEL = "m"
PATH = "/v1/chat/completions"
# Distinct chats of a size; every fourth begins another conversation.
CHATS = 64
_TURNS = 4
_WORDS = ("the", "of", "and", "to", "in", "that", "for", "was", "with", "not", "but", "are", "this", "have", "from")


def bodies(size: int, stream: bool = False) -> list[bytes]:
    """Chats of about so many bytes: conversations, four turns of each, with all but the last message in common."""
    made = []
    for number in range(CHATS):
        conversation = Random(f"{size} {number // _TURNS}")
        roles = ("user", "assistant") * 8
        share = max(size // 16, 16)
        messages = [{"role": role, "content": _text(conversation, share)} for role in roles[:-1]] if size > 4096 else []
        last = _text(Random(f"{size} turn {number}"), share if messages else size - 100)
        chat = {"model": MODEL, "messages": [*messages, {"role": "user", "content": last}], "max_tokens": 16}
        made.append(json.dumps(chat | ({"stream": True} if stream else {})).encode())
    return made


def _text(random: Random, size: int) -> str:
    text = " ".join(random.choices(_WORDS, k=size // 3))
    return text[:size]
