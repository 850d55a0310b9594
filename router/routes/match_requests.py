"""Reading `/match`: the prompt of the question, tokenized as a request's would be."""

from __future__ import annotations

from collections.abc import Callable

from indexer import DEFAULT_TENANT, MatchQuery
from indexer.errors import RequestError
from indexer.questions import ReadMatch
from router.apis.openai_requests import decode_match
from router.apis.requests import ChatPrompt
from router.forwarding.long_bodies import aside_if_long
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

# The model and adapter behind a name. Raises RequestError (404) for a name that no worker serves.
Resolve = Callable[[str, str], tuple[str, str | None]]


def match_reader(tokenizers: Tokenizers, resolve: Resolve) -> ReadMatch:
    """What the index API needs to answer `/match` for prompts and messages; `resolve` takes a name and a tenant."""

    async def read(body: bytes) -> MatchQuery:
        asked = await aside_if_long(body, decode_match)
        tenant = asked.tenant_id or DEFAULT_TENANT
        model, adapter = resolve(asked.model, tenant)
        try:
            (token_ids,) = await tokenizers.token_ids(model, asked.prompt, len(body))
        except TokenizerUnavailableError as error:
            raise RequestError(
                f"{error}: send token_ids instead, or set models.{model}.tokenizer",
                param="messages" if isinstance(asked.prompt, ChatPrompt) else "prompt",
            ) from error
        except ValueError as error:
            raise RequestError("prompt: /match takes one prompt. Ask for each of them.", param="prompt") from error
        return MatchQuery(model, token_ids, asked.lora_name or adapter, asked.cache_salt, tenant)

    return read
