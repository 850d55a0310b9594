"""A worker's `POST /tokenize`: token ids for a model whose tokenizer is not at hand."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Any

import aiohttp
import msgspec

from indexer.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.fields import MAX_TOKEN_ID
from router.apis.requests import ChatPrompt, TextPrompts
from router.errors import TokenizerUnavailableError
from router.tokens.chat_template import template_variables


class _Tokens(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]


class _Refusal(msgspec.Struct):
    message: str
    param: str | None = None


class _RefusalBody(msgspec.Struct):
    error: _Refusal


_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_refusal = msgspec.json.Decoder(_RefusalBody).decode


class RemoteTokenizer:
    """Asks one worker, at `url`, about one of its models. `timeout_seconds` is for one prompt."""

    way = "worker"
    cached_bytes = 0

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, timeout_seconds: float = 5.0) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/tokenize"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def token_ids(self, prompt: TextPrompts | ChatPrompt) -> list[PackedPrompt]:
        """The token ids of each prompt.

        Raises RequestError with the worker's words for a prompt it refuses, TokenizerUnavailableError when it does not
        answer, or not with token ids.
        """
        if isinstance(prompt, ChatPrompt):
            return [await self._ask(_chat_body(prompt))]
        return [
            await self._ask({"prompt": text, "add_special_tokens": prompt.add_special_tokens}) for text in prompt.texts
        ]

    async def _ask(self, body: dict[str, Any]) -> PackedPrompt:
        data = BytesIO(msgspec.json.encode({"model": self._model} | body))  # aiohttp writes it in pieces
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=data, headers=headers, timeout=self._timeout) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TokenizerUnavailableError(f"{self._url}: {str(error) or type(error).__name__}") from error
        try:
            if status == 200:
                return PackedPrompt.of(_decode_tokens(answer).tokens)
            # Other refusals, such as 404 where a server has no /tokenize, are not about the prompt.
            if status in (400, 422):
                refusal = _decode_refusal(answer).error
                raise RequestError(refusal.message, status=status, param=refusal.param)
        except msgspec.DecodeError as error:
            raise TokenizerUnavailableError(
                f"{self._url}: {status} with a body that makes no sense: {error}"
            ) from error
        raise TokenizerUnavailableError(f"{self._url}: status {status}")


def _chat_body(chat: ChatPrompt) -> dict[str, Any]:
    variables = template_variables(chat)
    body = {
        "messages": chat.messages,
        "add_generation_prompt": variables.pop("add_generation_prompt"),
        "continue_final_message": variables.pop("continue_final_message"),
        "add_special_tokens": chat.add_special_tokens,
        # What /tokenize has no field for (documents, reasoning_effort) is a variable of the template like any other.
        "chat_template_kwargs": variables,
    }
    optional = {"tools": chat.tools, "chat_template": chat.chat_template}
    return body | {key: value for key, value in optional.items() if value is not None}
