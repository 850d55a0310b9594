"""A server that reads prompts as vLLM does, by a tokenizer of ours; and as other engines do, by what a test changes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

import simulator.worker
from http_api.errors import RequestError
from indexer.hashing import MediaSpan, PackedPrompt
from router.apis.endpoints import CHAT, read_request
from router.apis.messages import media_parts
from router.apis.requests import ChatPrompt, TextPrompts
from router.fleet.worker import Worker
from router.settings import WorkerSettings
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles

MODEL = Path(simulator.worker.__file__).parent / "model"

# A template whose placeholder of an image is the token `IMAGE_TOKEN`.
SEES_IMAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|endoftext|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}"
)
IMAGE_TOKEN = 0


@cache
def with_template(template: str) -> LocalTokenizer:
    """Return the bundled tokenizer with another chat template."""
    return LocalTokenizer(replace(ModelFiles.read(MODEL), templates={"default": template}))


class PlayedEngine:
    """An engine that renders, tokenizes and answers with `tokenizer`, which a test may replace.

    - `renders`, `tokenizes`, `tells_ids`: the supported features.
    - `refusals`: the statuses of refused paths.
    - `asked`, `bodies`: the number of requests, and their bodies.
    - `image_token`: the template's token for an image; the URL of an image has its number of tokens after `#`.
    - `numbers_images`: each image after the first begins with other tokens.
    """

    def __init__(self, tokenizer: LocalTokenizer, model: str = "m") -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.renders = self.tokenizes = self.tells_ids = True
        self.refusals: dict[str, int] = {}
        self.hangs = False
        self.image_token: int | None = None
        self.numbers_images = False
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    @property
    def worker(self) -> Worker:
        """The engine as a worker of the fleet."""
        found = Worker(WorkerSettings(url=self.url))
        found.problem = None
        return found

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PlayedEngine]:
        """Answer requests meanwhile, on a port of its own."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        body = await request.read()
        self.bodies.append(await request.json())
        if self.hangs:
            await asyncio.sleep(60)
        if request.path in self.refusals:
            headers = {"Location": "/elsewhere"} if self.refusals[request.path] // 100 == 3 else None
            return web.Response(status=self.refusals[request.path], text="refused", headers=headers)
        try:
            if request.path.endswith("/render"):
                return self._rendered(request.path.removesuffix("/render"), body)
            if request.path == "/tokenize":
                return self._tokenized(body)
            return self._computed(request.path, body)
        except RequestError as error:
            return web.json_response({"error": {"message": error.message}}, status=400)

    def _rendered(self, path: str, body: bytes) -> web.Response:
        if not self.renders:
            return web.Response(status=403, text="start with --enable-scale-out")
        found = self._ids(path, body)
        prompts = [list(ids) for ids in found]
        if media := found[0].media:
            assert json.loads(body)["mm_payload"] == "none"
            places = [{"offset": each.start, "length": each.end - each.start} for each in media]
            features = {"mm_hashes": {"image": [each.name for each in media]}, "mm_placeholders": {"image": places}}
            return web.json_response({"token_ids": prompts[0], "features": features})
        if path == "/v1/completions":
            return web.json_response([{"token_ids": ids} for ids in prompts])
        return web.json_response({"token_ids": prompts[0]})

    def _tokenized(self, body: bytes) -> web.Response:
        if not self.tokenizes:
            return web.Response(status=404)
        path = "/v1/completions" if b'"prompt":' in body else CHAT
        (ids,) = self._ids(path, body)
        return web.json_response({"tokens": list(ids), "count": len(ids)})

    def _computed(self, path: str, body: bytes) -> web.Response:
        (ids,) = self._ids(path, body)
        told = {"prompt_token_ids": list(ids)} if self.tells_ids else {}
        return web.json_response({"choices": [{"text": "a"}]} | told)

    def _ids(self, path: str, body: bytes) -> list[Any]:
        request = read_request("POST", path, [], body)
        assert request.name == self.model
        assert isinstance(request.prompt, (ChatPrompt, TextPrompts))
        if self.image_token is not None and isinstance(request.prompt, ChatPrompt):
            return [self._with_images(request.prompt)]
        return self.tokenizer.tokenize(request.prompt)

    def _with_images(self, chat: ChatPrompt) -> PackedPrompt:
        images = [part["image_url"]["url"] for part, _ in media_parts(chat.messages)]
        tokens: list[int] = []
        media: list[MediaSpan] = []
        for token in self.tokenizer.tokenize(chat)[0]:
            if token != self.image_token:
                tokens.append(token)
                continue
            url, number = images[len(media)], min(len(media), 1) if self.numbers_images else 0
            if "broken" in url:
                raise RequestError("no image")
            begin = len(tokens)
            tokens += [5 + number, *[token] * int(url.partition("#")[2]), 6]
            media.append(MediaSpan(begin, len(tokens), f"{url} {chat.media_options}"))
        return PackedPrompt.of(tokens) if not media else PackedPrompt(PackedPrompt.of(tokens).tokens, tuple(media))
