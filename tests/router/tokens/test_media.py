"""Prompts with images: exact up to the first image, distinguished after it."""

from __future__ import annotations

from typing import Any

import pytest
from played_engine import MODEL, with_template

from router.apis.requests import ChatPrompt, Truncation
from router.tokens import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.tokenizers import Tokenized, Tokenizers

# Loops over parts, as templates of models with vision do.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}</{{ m.role }}>{% endfor %}"
)
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TEXT = {"type": "text", "text": "What is on this picture that I took yesterday, and where was it?"}
SYSTEM = {"role": "system", "content": "You look at pictures."}


@pytest.fixture(scope="module", params=[PARTS, TEXTS], ids=["parts", "texts"])
def local(request: pytest.FixtureRequest) -> LocalTokenizer:
    return with_template(request.param)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


async def tokenized(tokenizers: Tokenizers, *parts: dict[str, Any], more: tuple[dict[str, Any], ...] = ()) -> Tokenized:
    return await tokenizers.tokenize("m", ChatPrompt([SYSTEM, {"role": "user", "content": list(parts)}, *more]))


@pytest.mark.parametrize(
    ("local", "known"),
    [(PARTS, TEXT["text"]), (TEXTS, "")],  # in content as one text, vLLM puts the placeholders of images first
    indirect=["local"],
)
async def test_tokens_before_the_first_image_are_exact(tokenizers: Tokenizers, known: str) -> None:
    (ids,) = (await tokenized(tokenizers, TEXT, image("http://a/1.png"))).token_ids
    start = "<system>You look at pictures.</system><user>"
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(MODEL).decode(list(ids)) == start + known


async def test_images_have_tokens_by_their_content_and_not_their_detail(tokenizers: Tokenizers) -> None:
    first, again, other = [await tokenized(tokenizers, TEXT, image(url)) for url in ("data:,1", "data:,1", "data:,2")]
    assert first == again
    assert first.token_ids == other.token_ids
    assert first.identities != other.identities
    near = {"type": "image_url", "image_url": {"url": "data:,1", "detail": "high"}}
    assert await tokenized(tokenizers, image("data:,1")) == await tokenized(tokenizers, near)


async def test_next_turn_begins_with_the_previous_turn(tokenizers: Tokenizers) -> None:
    first = await tokenized(tokenizers, image("data:,1"), TEXT)
    answer = {"role": "assistant", "content": "A cat."}
    second = await tokenized(
        tokenizers, image("data:,1"), TEXT, more=(answer, {"role": "user", "content": [image("data:,2")]})
    )
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
async def test_all_kinds_of_media_are_distinguished(tokenizers: Tokenizers, part: dict[str, Any]) -> None:
    found = await tokenized(tokenizers, TEXT, part)
    assert len(found.token_ids[0]) < len(found.identities[0])


async def test_prompt_without_media_is_exact(tokenizers: Tokenizers) -> None:
    found = await tokenized(tokenizers, TEXT)
    assert found.token_ids == found.identities


async def test_tokenizer_without_media_support_reports_it(tokenizers: Tokenizers) -> None:
    chat = ChatPrompt([{"role": "user", "content": [image("data:,1")]}], truncation=Truncation(5))
    with pytest.raises(TokenizerUnavailableError):
        await tokenizers.tokenize("m", chat)
    with pytest.raises(TokenizerUnavailableError):
        await tokenizers.tokenize("other", ChatPrompt(chat.messages))
