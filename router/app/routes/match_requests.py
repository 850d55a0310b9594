"""Reading of `/match` requests, whose prompts are tokenized like those of other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from http_api.errors import RequestError
from indexer import DEFAULT_TENANT, MatchQuery
from indexer.api.questions import ReadMatch
from router.apis.openai_requests import decode_match
from router.apis.requests import ChatPrompt, MatchRequest
from router.forwarding.long_bodies import LONG_BODY
from router.tokens.tokenizers import Tokenized, Tokenizers, TokenizerUnavailableError

# Returns the model and adapter of a (name, tenant). Raises RequestError (404) for a name that no worker serves.
Resolve = Callable[[str, str], tuple[str, str | None]]


def match_reader(tokenizers: Tokenizers, resolve: Resolve) -> ReadMatch:
    """Return the reader of `/match` for prompts and messages. `resolve`: a name's model and adapter for a tenant."""

    def read(body: bytes) -> MatchQuery | Awaitable[MatchQuery]:
        return read_long(body) if len(body) > LONG_BODY else tokenized(decode_match(body), len(body))

    async def read_long(body: bytes) -> MatchQuery:
        query = tokenized(await asyncio.to_thread(decode_match, body), len(body))
        return query if isinstance(query, MatchQuery) else await query

    def tokenized(asked: MatchRequest, size: int) -> MatchQuery | Awaitable[MatchQuery]:
        """Return the query, or an awaitable of it if its prompt is long. `size` is the body's size in bytes."""
        model, adapter = resolve(asked.model, asked.tenant_id or DEFAULT_TENANT)
        with _explained(asked, model):
            now = tokenizers.tokenize_now(model, asked.prompt, size)
            return tokenized_aside(asked, model, adapter) if now is None else _query(asked, model, adapter, now)

    async def tokenized_aside(asked: MatchRequest, model: str, adapter: str | None) -> MatchQuery:
        with _explained(asked, model):
            return _query(asked, model, adapter, await tokenizers.tokenize_aside(model, asked.prompt))

    return read


def _query(asked: MatchRequest, model: str, adapter: str | None, tokenized: Tokenized) -> MatchQuery:
    """Return the query of a tokenized prompt. Raises ValueError unless there is exactly one prompt."""
    (token_ids,) = tokenized.token_ids
    tenant = asked.tenant_id or DEFAULT_TENANT
    return MatchQuery(model, token_ids, asked.lora_name or adapter, asked.cache_salt, tenant)


@contextmanager
def _explained(asked: MatchRequest, model: str) -> Iterator[None]:
    """Convert errors of tokenization to RequestErrors that say what to send instead."""
    try:
        yield
    except TokenizerUnavailableError as error:
        raise RequestError(
            f"{error}: send token_ids instead, or set models.{model}.tokenizer",
            param="messages" if isinstance(asked.prompt, ChatPrompt) else "prompt",
        ) from error
    except ValueError as error:
        raise RequestError("prompt: /match takes one prompt. Ask for each of them.", param="prompt") from error
