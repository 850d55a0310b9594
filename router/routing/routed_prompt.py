"""What routing knows of a request once its prompts are tokens."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.hashing import PackedPrompt
from router.apis.requests import RoutedRequest
from router.apis.sessions import AgentHints
from router.tokens.tokenizers import Tokenized

# For prompts whose tokens are not known: English text has about this many bytes a token.
_BYTES_PER_TOKEN = 4


_NO_PROMPTS: list[PackedPrompt] = []
_NO_TOKENS = PackedPrompt(b"")


@dataclass(slots=True, init=False)
class RoutedPrompt:
    """What routing knows of a request.

    `name`: the model or adapter it asks for, None when any worker will do. `tokens`: the length of its prompts, which
    is an estimate when not all is known. `token_ids` are those that the engine will compute for sure; `identities` also
    differ where only the engine knows the tokens, such as those of images, and are otherwise the same.
    `exact`: the worker is expected to compute just these tokens. `answers`: how many each prompt wants, of `max_tokens`
    at most. `stored`: a response or another thing it is about, which only the worker that made it has. `priority`: as
    the body has it, lower is sooner. `path`: where it was sent. `by_text`: text stands for tokens in `identities`.
    `reads_cache`: false where the engine computes the prompts from their start, whatever it has of them. `hints`: what
    its agent tells of the answer and the session.
    """

    name: str | None
    tokens: int
    token_ids: list[PackedPrompt]
    identities: list[PackedPrompt]
    exact: bool
    cache_salt: str | None
    answers: int
    streamed: bool
    session: str | None
    max_tokens: int | None
    stored: str | None
    priority: int
    path: str
    by_text: bool
    reads_cache: bool
    hints: AgentHints | None

    def __init__(
        self,
        name: str | None,
        tokens: int,
        token_ids: list[PackedPrompt] = _NO_PROMPTS,
        identities: list[PackedPrompt] = _NO_PROMPTS,
        exact: bool = False,
        cache_salt: str | None = None,
        answers: int = 1,
        streamed: bool = False,
        session: str | None = None,
        max_tokens: int | None = None,
        stored: str | None = None,
        priority: int = 0,
        path: str = "",
        by_text: bool = False,
        reads_cache: bool = True,
        hints: AgentHints | None = None,
    ) -> None:
        self.name = name
        self.tokens = tokens
        self.token_ids = token_ids
        self.identities = identities
        self.exact = exact
        self.cache_salt = cache_salt
        self.answers = answers
        self.streamed = streamed
        self.session = session
        self.max_tokens = max_tokens
        self.stored = stored
        self.priority = priority
        self.path = path
        self.by_text = by_text
        self.reads_cache = reads_cache
        self.hints = hints

    @property
    def output_told(self) -> int | None:
        """Tokens that its agent expects of the answer; None: it does not tell."""
        return None if self.hints is None else self.hints.output_tokens


def unread_prompt(request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
    """A prompt whose tokens are not known, routed by load alone."""
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
    """A prompt of which only the text is known (router/tokens/text_prefixes.py): no event tells who holds it."""
    prompt = tokenized_prompt(request, Tokenized([_NO_TOKENS] * len(texts), texts))
    prompt.by_text = True
    return prompt


def tokenized_prompt(request: RoutedRequest, tokenized: Tokenized) -> RoutedPrompt:
    """A prompt whose tokens are known."""
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
