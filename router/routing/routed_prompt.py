"""A request as routing sees it, once its prompts are tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from indexer.hashing import PackedPrompt
from router.apis.requests import RoutedRequest
from router.apis.sessions import AgentHints
from router.tokens.tokenizers import Tokenized

# Bytes per token of English text, to estimate the tokens of prompts that are not tokenized.
_BYTES_PER_TOKEN = 4


_NO_TOKENS = PackedPrompt(b"")


@dataclass(slots=True)
class RoutedPrompt:
    """A request as routing sees it.

    - `name`: the model or adapter it asks for; None: any.
    - `tokens`: the tokens of its prompts; an estimate if not all of them are known.
    - `token_ids`: the tokens that the engine computes.
    - `identities`: the same, with marks where only the engine knows the tokens, such as those of images.
    - `exact`: whether the engine is expected to compute exactly these tokens.
    - `answers`: the answers that each prompt asks for, of at most `max_tokens` tokens each.
    - `stored`: the id of a response or file that only the worker that made it has.
    - `priority`: the body's priority; lower is sooner.
    - `path`: the path of the request.
    - `by_text`: whether `identities` are bytes of text instead of tokens.
    - `reads_cache`: whether the engine uses cached blocks for it.
    - `hints`: what its agent announces of the answer and the session.
    """

    name: str | None
    tokens: int
    token_ids: list[PackedPrompt] = field(default_factory=list)
    identities: list[PackedPrompt] = field(default_factory=list)
    exact: bool = False
    cache_salt: str | None = None
    answers: int = 1
    streamed: bool = False
    session: str | None = None
    max_tokens: int | None = None
    stored: str | None = None
    priority: int = 0
    path: str = ""
    by_text: bool = False
    reads_cache: bool = True
    hints: AgentHints | None = None

    @property
    def announced_output(self) -> int | None:
        """Tokens of the answer that its agent announces; None if it does not."""
        return None if self.hints is None else self.hints.output_tokens


def unread_prompt(request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
    """Return a prompt that is routed by load alone, because its tokens are not known."""
    return RoutedPrompt(
        request.model,
        body_bytes // _BYTES_PER_TOKEN,
        streamed=request.stream,
        session=request.session,
        stored=request.stored,
        priority=request.priority,
        hints=request.hints,
    )


def text_prompt(request: RoutedRequest, texts: list[PackedPrompt]) -> RoutedPrompt:
    """Return a prompt that is known by its text alone (router/tokens/text_prefixes.py). No event reports its blocks."""
    prompt = tokenized_prompt(request, Tokenized([_NO_TOKENS] * len(texts), texts))
    prompt.by_text = True
    return prompt


def tokenized_prompt(request: RoutedRequest, tokenized: Tokenized) -> RoutedPrompt:
    """Return a prompt whose tokens are known."""
    token_ids, identities = tokenized
    return RoutedPrompt(
        request.model,
        sum([len(identity) for identity in identities]),
        token_ids,
        identities,
        identities is token_ids and request.stored is None and not request.other_prompts,
        request.cache_salt,
        request.n,
        request.stream,
        request.session,
        request.max_tokens,
        request.stored,
        request.priority,
        reads_cache=request.reads_cache,
        hints=request.hints,
    )
