"""Token ids of prompts from engines: `/v1/…/render`, `/tokenize`, and the ids in an answer.

vLLM renders requests without computing them if it is started with `--enable-scale-out`. Its `/tokenize` supports only
chats and texts. Older versions and SGLang have only `/tokenize`. In SGLang it renders a chat as its API for chats does.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Annotated, Any

import aiohttp
import msgspec

from indexer.hashing import MediaSpan, PackedPrompt
from kvevents.decoding import json_reader, read_json
from router.apis.endpoints import CHAT
from router.apis.fields import MAX_TOKEN_ID
from router.apis.messages import has_media
from router.apis.requests import ChatPrompt, TextPrompts
from router.fleet.discovery import Engine
from router.fleet.worker_keys import WorkerKey
from router.http.client import connection_problem, read_answer
from router.tokens import TokenizerUnavailableError
from router.tokens.chat_template import template_variables

_COMPLETIONS = "/v1/completions"
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]
# Fields that only an answer needs. Some exclude each other, or wait for another request.
_NOT_RENDERED = ("stream", "stream_options", "kv_transfer_params", "cache_salt", "request_id", "priority")
# Fields that SGLang's chats do not have, and its `/tokenize` has.
_NOT_SGLANGS = ("prompt", "add_generation_prompt", "add_special_tokens")


# Largest answer: the ids of the longest prompt, with a media item's name for each block.
_MOST_ANSWER = 256 * 2**20
# Longest name of a media item, which is hashed into each of its blocks. A client can choose it (`uuid`).
_MOST_NAME = 256
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_MOST_RELEASE = 2**20
_RELEASE_PATHS = {Engine.VLLM: "/version", Engine.SGLANG: "/server_info"}


class PromptRefusedError(TokenizerUnavailableError):
    """An engine refuses this prompt; the message has the engine's words."""


class NotOfferedError(TokenizerUnavailableError):
    """An engine does not offer this endpoint."""


class _Placeholder(msgspec.Struct):
    offset: _Count
    length: _Count


class _Features(msgspec.Struct):
    """Media items by modality: their names, and the tokens of the prompt that represent them."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Placeholder]]


class _Rendered(msgspec.Struct):
    token_ids: _TokenIds
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: _TokenIds


class _Choice(msgspec.Struct):
    prompt_token_ids: _TokenIds | None = None


class _Answer(msgspec.Struct):
    prompt_token_ids: _TokenIds | None = None
    choices: list[_Choice] = []


class Release(msgspec.Struct):
    """An engine's release; `chat_template`: the name or file of the template that SGLang was started with, if any."""

    version: str = ""
    chat_template: str | None = None


_decode_release = json_reader(Release)
_decode_rendered = json_reader(_Rendered | list[_Rendered])
_decode_tokenized = json_reader(_Tokenized)
_decode_answer = json_reader(_Answer)


def is_converted(prompt: ChatPrompt | TextPrompts) -> bool:
    """Return whether a prompt is not from the chats API, so that `/tokenize` sees only the router's conversion."""
    return isinstance(prompt, ChatPrompt) and prompt.call is not None and prompt.call[0] != CHAT


class EngineClient:
    """A client for workers' token ids of one model's prompts. `timeout_seconds` applies to each request.

    All methods raise TokenizerUnavailableError if a worker does not answer with token ids in time. Its subclass
    PromptRefusedError means that the worker refuses the prompt, NotOfferedError that it does not offer the endpoint.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        timeout_seconds: float = 5.0,
        key_of: Callable[[str], WorkerKey | None] = lambda _: None,
        engine_of: Callable[[str], Engine | None] = lambda _: None,
    ) -> None:
        """Create a client.

        - `key_of`: returns the API key for a worker's URL; None if it needs none.
        - `engine_of`: returns the engine at a worker's URL; None if it is unknown.
        """
        self.model = model
        self._engine_of = engine_of
        self._key_of = key_of
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def rendered(self, url: str, prompt: ChatPrompt | TextPrompts) -> list[PackedPrompt]:
        """Return the token ids of each prompt by the engine's own rendering, and which of them are media."""
        _, body = self._request(prompt)
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            body["mm_payload"] = "none"  # omit the pixels
        found = _decoded(url, _decode_rendered, await self._post(url, self.render_path(prompt), body))
        return [_packed(url, each) for each in (found if isinstance(found, list) else [found])]

    async def tokenized(self, url: str, prompt: ChatPrompt | TextPrompts) -> list[PackedPrompt]:
        """Return the token ids of each prompt by `/tokenize`, which supports chats and texts."""
        sglang = self._engine_of(url) is Engine.SGLANG
        if isinstance(prompt, ChatPrompt):
            bodies = [_sglang_fields(prompt) if sglang else _chat_fields(prompt)]
        else:
            add = prompt.add_special_tokens or sglang
            bodies = [{"prompt": text, "add_special_tokens": add} for text in prompt.texts]
        answers = [await self._post(url, "/tokenize", body | {"model": self.model}) for body in bodies]
        prompts = [PackedPrompt.of(_decoded(url, _decode_tokenized, answer).tokens) for answer in answers]
        texts = prompt.texts if isinstance(prompt, TextPrompts) else [CHAT]
        if any(text and not len(found) for text, found in zip(texts, prompts, strict=True)):
            # llama.cpp's /tokenize reads another field and returns no tokens.
            raise NotOfferedError(f"{url}: its /tokenize has another format")
        # SGLang truncates nothing.
        return [prompt.truncation.apply(each) for each in prompts] if prompt.truncation and not sglang else prompts

    async def computed(self, url: str, prompt: ChatPrompt | TextPrompts) -> list[PackedPrompt]:
        """Return the token ids of one prompt by computing it, with an answer of one token."""
        path, body = self._request(prompt)
        if path not in (CHAT, _COMPLETIONS):
            raise NotOfferedError(f"{url}: only chats and completions return token ids")
        body |= {"max_tokens": 1, "max_completion_tokens": 1, "return_token_ids": True}
        body["return_prompt_token_ids"] = True  # the name in older releases of SGLang
        if path == _COMPLETIONS:
            del body["max_completion_tokens"]
        answer = _decoded(url, _decode_answer, await self._post(url, path, body))
        ids = answer.prompt_token_ids or (answer.choices[0].prompt_token_ids if answer.choices else None)
        if ids is None:
            raise NotOfferedError(f"{url}: it does not return the token ids of a prompt")
        return [PackedPrompt.of(ids)]

    async def release(self, url: str, engine: Engine) -> Release:
        """Return the engine's release; without a version if it does not report it."""
        key, path = self._key_of(url), _RELEASE_PATHS.get(engine)
        if path is None:
            return Release()
        try:
            async with self._session.get(
                f"{url}{path}", headers=key.headers if key else {}, timeout=self._timeout, allow_redirects=False
            ) as response:
                return _decode_release(await read_answer(response, _MOST_RELEASE))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return Release()

    def render_path(self, prompt: ChatPrompt | TextPrompts) -> str:
        if isinstance(prompt, TextPrompts):
            return f"{_COMPLETIONS}/render"
        return f"{prompt.call[0] if prompt.call else CHAT}/render"

    def _request(self, prompt: ChatPrompt | TextPrompts) -> tuple[str, dict[str, Any]]:
        call = prompt.call if isinstance(prompt, ChatPrompt) else None
        if call is not None:
            path, body = call[0], _own_fields(call[1])
        elif isinstance(prompt, ChatPrompt):
            path, body = CHAT, _chat_fields(prompt)
        else:
            texts: list[str] | str = prompt.texts if len(prompt.texts) > 1 else prompt.texts[0]
            path, body = _COMPLETIONS, {"prompt": texts, "add_special_tokens": prompt.add_special_tokens}
        return path, body | {"model": self.model}

    async def _post(self, worker: str, path: str, body: dict[str, Any]) -> bytes:
        data = BytesIO(msgspec.json.encode(body))  # aiohttp writes it in pieces
        key, url = self._key_of(worker), worker + path
        headers = {"Content-Type": "application/json", **(key.headers if key else {})}
        try:
            # A redirect could leave the allowed networks.
            async with self._session.post(
                url, data=data, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                status, answer = response.status, await read_answer(response, _MOST_ANSWER)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TokenizerUnavailableError(f"{url}: {connection_problem(error)}") from error
        if key is not None and status != 403:  # 403 can also mean that rendering is disabled
            key.record_status(path, status)
        if status == 200:
            return answer
        if status in (400, 413, 422):
            raise PromptRefusedError(f"{url}: status {status}: {answer[:500].decode(errors='replace')}")
        if status in (403, 404, 405, 501) or 300 <= status < 400:
            raise NotOfferedError(f"{url}: status {status}")
        raise TokenizerUnavailableError(f"{url}: status {status}")


def _decoded(url: str, decode: Any, answer: bytes) -> Any:
    try:
        return decode(answer)
    except msgspec.DecodeError as error:
        raise TokenizerUnavailableError(f"{url}: invalid answer: {error}") from error


def _packed(url: str, rendered: _Rendered) -> PackedPrompt:
    prompt = PackedPrompt.of(rendered.token_ids)
    features = rendered.features
    if features is None:
        return prompt
    media: list[MediaSpan] = []
    for modality, names in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        if len(places) != len(names):
            raise TokenizerUnavailableError(f"{url}: {len(names)} items of {modality} in {len(places)} places")
        for name, place in zip(names, places, strict=True):
            if len(name) > _MOST_NAME:
                raise PromptRefusedError(f"{url}: an item whose name has {len(name)} characters")
            media.append(MediaSpan(place.offset, place.offset + place.length, name))
    media.sort()
    if media and media[-1].end > len(prompt):
        raise TokenizerUnavailableError(f"{url}: media beyond the prompt's end")
    return PackedPrompt(prompt.tokens, tuple(media))


def _own_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a client's request that can change its prompt."""
    try:
        fields = read_json(body, dict[str, Any])
    except msgspec.DecodeError as error:
        raise TokenizerUnavailableError(f"the request is not JSON: {error}") from error
    return {name: value for name, value in fields.items() if name not in _NOT_RENDERED}


def _sglang_fields(chat: ChatPrompt) -> dict[str, Any]:
    """Return the fields of a chat for SGLang's `/tokenize`, which reads those of a chat.

    It renders a chat as it answers one only without `add_generation_prompt`, which chats do not have.
    """
    call = chat.call
    fields = _own_fields(call[1]) if call is not None and call[0] == CHAT else _chat_fields(chat)
    return {name: value for name, value in fields.items() if name not in _NOT_SGLANGS}


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts of text in the format of chats, which has no `input_text`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]
    return message | {"content": parts}


def _chat_fields(chat: ChatPrompt) -> dict[str, Any]:
    """Return the fields of a chat for `/tokenize`; other template variables become `chat_template_kwargs`."""
    variables = template_variables(chat)
    fields = {
        "messages": [_chat_message(message) for message in chat.messages],
        "add_generation_prompt": variables.pop("add_generation_prompt"),
        "continue_final_message": variables.pop("continue_final_message"),
        "add_special_tokens": chat.add_special_tokens,
    }
    optional = {"tools": chat.tools, "chat_template": chat.chat_template, "chat_template_kwargs": variables or None}
    fields |= {name: value for name, value in optional.items() if value is not None}
    return fields | (chat.media_options or {})
