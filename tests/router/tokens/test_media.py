"""Prompts with images: exact up to the first image, distinguished after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import simulator.worker
from router.apis.requests import ChatPrompt, Truncation
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import files_of
from router.tokens.tokenizers import Tokenized, Tokenizers

MODEL = str(Path(simulator.worker.__file__).parent / "model")
# Loops over parts, as templates of models with vision do.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}</{{ m.role }}>{% endfor %}"
)
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TEXT = {"type": "text", "text": "What is on this picture that I took yesterday, and where was it?"}
SYSTEM = {"role": "system", "content": "You look at pictures."}


def tokenizer(template: str) -> LocalTokenizer:
    loaded: Any = AutoTokenizer.from_pretrained(MODEL)
    loaded.chat_template = template
    return LocalTokenizer(files_of(loaded))


@pytest.fixture(scope="module", params=[PARTS, TEXTS], ids=["parts", "texts"])
def local(request: pytest.FixtureRequest) -> LocalTokenizer:
    return tokenizer(request.param)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def tokenized(local: LocalTokenizer, *parts: dict[str, Any], more: tuple[dict[str, Any], ...] = ()) -> Tokenized:
    async def act() -> Tokenized:
        tokenizers = Tokenizers()
        tokenizers.add("m", local)
        try:
            return await tokenizers.tokenize("m", ChatPrompt([SYSTEM, {"role": "user", "content": list(parts)}, *more]))
        finally:
            await tokenizers.close()

    return asyncio.run(act())


def exact_text(found: Tokenized) -> str:
    (ids,) = found.token_ids
    text: str = AutoTokenizer.from_pretrained(MODEL).decode(list(ids))
    return text


def test_tokens_before_the_first_image_are_exact() -> None:
    start = "<system>You look at pictures.</system><user>"
    parts, texts = tokenizer(PARTS), tokenizer(TEXTS)
    assert exact_text(tokenized(parts, TEXT, image("http://a/1.png"))) == start + TEXT["text"]
    # In content as one text, vLLM puts the placeholders of images first.
    assert exact_text(tokenized(texts, TEXT, image("http://a/1.png"))) == start


def test_equal_images_have_equal_tokens_and_others_differ(local: LocalTokenizer) -> None:
    first, again, other = (tokenized(local, TEXT, image(url)) for url in ("data:,1", "data:,1", "data:,2"))
    assert first == again
    assert first.token_ids == other.token_ids
    assert first.identities != other.identities


def test_detail_of_an_image_does_not_change_tokens(local: LocalTokenizer) -> None:
    near = {"type": "image_url", "image_url": {"url": "data:,1", "detail": "high"}}
    assert tokenized(local, image("data:,1")) == tokenized(local, near)


def test_next_turn_begins_with_the_previous_turn(local: LocalTokenizer) -> None:
    first = tokenized(local, image("data:,1"), TEXT)
    answer = {"role": "assistant", "content": "A cat."}
    second = tokenized(local, image("data:,1"), TEXT, more=(answer, {"role": "user", "content": [image("data:,2")]}))
    assert second.identities[0].tokens.startswith(first.identities[0].tokens)
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:,1"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://a/b.mp4"}},
        {"image_url": {"url": "data:,1"}},
        {"type": "image_url", "uuid": "known"},
        {"type": "image_url"},
    ],
)
def test_all_kinds_of_media_are_distinguished(local: LocalTokenizer, part: dict[str, Any]) -> None:
    found = tokenized(local, TEXT, part)
    assert len(found.token_ids[0]) < len(found.identities[0])


def test_prompt_without_media_is_exact(local: LocalTokenizer) -> None:
    found = tokenized(local, TEXT)
    assert found.token_ids == found.identities


def test_tokenizer_without_media_support_reports_it(local: LocalTokenizer) -> None:
    async def act() -> None:
        tokenizers = Tokenizers()
        tokenizers.add("m", local)
        chat = ChatPrompt([{"role": "user", "content": [image("data:,1")]}], truncation=Truncation(5))
        try:
            with pytest.raises(TokenizerUnavailableError):
                await tokenizers.tokenize("m", chat)
            with pytest.raises(TokenizerUnavailableError):
                await tokenizers.tokenize("other", ChatPrompt(chat.messages))
        finally:
            await tokenizers.close()

    asyncio.run(act())
