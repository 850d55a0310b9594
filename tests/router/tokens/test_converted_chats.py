"""Chats converted from other APIs: the places of system messages, and disabled thinking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import simulator.worker
from router.apis.requests import ChatPrompt
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import files_of

MODEL = str(Path(simulator.worker.__file__).parent / "model")
ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('No.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
THINKS = ANYWHERE + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
REFUSES_NONE = (
    ANYWHERE + "{% if reasoning_effort == 'none' %}{{ raise_exception('No.') }}{% endif %}{{ reasoning_effort }}"
)
CHAT = [
    {"role": "system", "content": "One."},
    {"role": "user", "content": "hi"},
    {"role": "system", "content": "Two."},
]


def rendered(template: str, chat: ChatPrompt) -> str:
    loaded: Any = AutoTokenizer.from_pretrained(MODEL)
    loaded.chat_template = template
    return LocalTokenizer(files_of(loaded)).render(chat)


@pytest.mark.parametrize(
    ("template", "text"),
    [(ANYWHERE, "<system>One.<user>hi<system>Two."), (FIRST, "<system>One.Two.<user>hi")],
)
def test_system_messages_are_merged_if_template_accepts_only_one(template: str, text: str) -> None:
    assert rendered(template, ChatPrompt(CHAT, merges_system=True)) == text
    assert rendered(template, ChatPrompt(CHAT[1:], merges_system=True)) == text.replace("One.", "").replace(
        "<system><user>", "<user>"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (THINKS, "<user>hi[False]"),  # it knows "none"
        (ANYWHERE, "<user>hi"),
        (REFUSES_NONE, "<user>hilow"),
    ],
)
def test_thinking_is_disabled_by_the_variable_of_the_template(template: str, text: str) -> None:
    assert rendered(template, ChatPrompt(CHAT[1:2], thinking_off=True)) == text
