"""The reading of requests: the model behind the name, and the tokens of the prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import structlog

from http_api.errors import RequestError
from indexer import Indexer, MatchQuery, PoolHoldings
from indexer.hashing import PackedPrompt
from router.apis.abilities import NO_ABILITIES, Ability
from router.apis.endpoints import RESPONSES
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.response_turns import Turn
from router.apis.sessions import AgentHints
from router.fleet.fleet import Fleet
from router.http.headers import HeaderItems
from router.routing.pool_verifier import PoolVerifier
from router.routing.state import RoutingState
from router.routing.target_directory import unknown_model
from router.tokens.text_prefixes import text_prefixes
from router.tokens.tokenizers import OnTrialError, Tokenized, Tokenizers, TokenizerUnavailableError

log = structlog.get_logger()

# Bytes per token of English text, to estimate the tokens of prompts that are not tokenized.
_BYTES_PER_TOKEN = 4
_NO_TOKENS = PackedPrompt(b"")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request, for policies of one's own: its tenant ("" without tenants), and the headers."""

    tenant: str
    headers: HeaderItems


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
    - `by_text`: whether `identities` are bytes of text instead of tokens.
    - `reads_cache`: whether the engine uses cached blocks for it.
    - `unknown_name`: whether it asks for a name that no worker serves, which an engine may load.
    - `dp_rank`: the only DP rank that may receive it; None: any.
    - `needs`: the abilities that it needs, as far as workers differ in them.
    - `turn`: its part of a conversation that later requests may continue by the id of its response.
    - `encoding`: the predicted seconds until encode workers have encoded its media.
    - `verified`: what pools of unknown content have of it, as they answered before the choice.
    - `sender`: its sender; None if no policy reads it.
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
    unknown_name: bool = False
    dp_rank: int | None = None
    needs: frozenset[Ability] = NO_ABILITIES
    turn: Turn | None = None
    encoding: float = 0.0
    verified: tuple[PoolHoldings, ...] = ()
    sender: Sender | None = None

    @property
    def context(self) -> int:
        """The tokens of the longest prompt and its answer, which a model's context must hold."""
        prompt = max([len(identity) for identity in self.identities], default=0) or self.tokens
        return prompt + max(self.max_tokens or 1, 1)

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
        max_tokens=request.max_tokens,
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
        sum([identity.length for identity in identities]),
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


class PromptReader:
    """Finds a request's model and tokenizes its prompts."""

    def __init__(
        self,
        state: RoutingState,
        fleet: Fleet,
        indexer: Indexer,
        tokenizers: Tokenizers,
        forwards_unknown: bool = False,
        verifier: PoolVerifier | None = None,
    ) -> None:
        """Create a reader.

        - `forwards_unknown`: requests for unknown names are forwarded and not refused.
        - `verifier`: asks pools of unknown content about prompts; None without pools.
        """
        self._state = state
        self._fleet = fleet
        self._indexer = indexer
        self._tokenizers = tokenizers
        self._forwards_unknown = forwards_unknown
        self._verifier = verifier

    @property
    def needs_prompts(self) -> bool:
        """True while the policy or a recording reads prompts."""
        return self._state.needs_prompts

    def require_prompts(self, wanted: bool) -> None:
        """Set whether anything beside the policy reads prompts."""
        self._state.needs_prompts = wanted or self._state.policy.spec.reads_prompts

    def resolve(self, name: str, tenant: str) -> tuple[str, str | None]:
        """Return the model and adapter behind a name. Raises RequestError (404) if no worker serves it."""
        name = self._fleet.aliases.get(name, name)
        serving = self._fleet.serving(name)
        if serving:
            return serving[0][1].model, serving[0][1].adapter
        if self._indexer.serves(name, tenant):
            return name, None
        raise unknown_model(self._fleet, name)

    async def read(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """Tokenize a request's prompts. Raises RequestError for an unknown model and for an invalid prompt."""
        return self.read_now(request, body_bytes) or await self.read_aside(request, body_bytes)

    def read_now(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt | None:
        """Return a request's prompt, if it is tokenized without blocking; else None, and `read_aside` does.

        Raises RequestError for a model that no worker serves.
        """
        name = request.model
        request, model = self._with_model(request)
        if not self._state.needs_prompts or model is None or request.prompt is None:
            prompt = unread_prompt(request, body_bytes)
            prompt.unknown_name = name is not None and request.model is None
            return prompt
        request, turn = self._with_earlier_turns(request, model)
        assert request.prompt is not None
        try:
            tokenized = self._tokenizers.tokenize_now(model, request.prompt, body_bytes)
        except (RequestError, OnTrialError) as error:
            return _routed_by_load(request, body_bytes, error)
        except TokenizerUnavailableError as error:
            return self._by_text(model, request, body_bytes, error)
        if tokenized is None or (self._verifier is not None and self._verifier.is_due):
            return None
        prompt = tokenized_prompt(request, tokenized)
        prompt.turn = turn
        return prompt

    async def read_aside(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """Tokenize the prompts that `read_now` did not, in a thread or by a worker. Raises RequestError."""
        request, model = self._with_model(request)
        if model is None or request.prompt is None:
            return unread_prompt(request, body_bytes)
        request, turn = self._with_earlier_turns(request, model)
        assert request.prompt is not None
        try:
            tokenized = await self._tokenizers.tokenize_aside(model, request.prompt)
        except (RequestError, OnTrialError) as error:
            return _routed_by_load(request, body_bytes, error)
        except TokenizerUnavailableError as error:
            return self._by_text(model, request, body_bytes, error)
        prompt = tokenized_prompt(request, tokenized)
        prompt.turn = turn
        if self._verifier is not None and prompt.name is not None and len(prompt.token_ids) == 1:
            serving = self._fleet.serving(prompt.name)
            adapter = serving[0][1].adapter if serving else None
            query = MatchQuery(model, prompt.token_ids[0], adapter, prompt.cache_salt)
            prompt.verified = await self._verifier.verified(query)
        return prompt

    def _with_earlier_turns(self, request: RoutedRequest, model: str) -> tuple[RoutedRequest, Turn | None]:
        """Return a request with the turns before it, and its own turn if it is for a response that may be stored."""
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt) or prompt.call is None or prompt.call[0] != RESPONSES:
            return request, None
        whole, turn = self._state.turns.begin(prompt, request.stored, self._tokenizers.keeps_items(model))
        return (request if whole is prompt else replace(request, prompt=whole)), turn

    def _by_text(self, model: str, request: RoutedRequest, body_bytes: int, error: Exception) -> RoutedPrompt:
        """Return a prompt that is known by its text, because it could not be tokenized."""
        begun = time.perf_counter()
        assert request.prompt is not None
        try:
            texts = text_prefixes(request.prompt)
        except TokenizerUnavailableError:
            return _routed_by_load(request, body_bytes, error)
        self._tokenizers.count_text(model, begun)
        log.debug("routed by its text", model=request.model, reason=str(error))
        return text_prompt(request, texts)

    def _with_model(self, request: RoutedRequest) -> tuple[RoutedRequest, str | None]:
        """Return a request with its name resolved, and the model behind it; None if any worker will do."""
        if request.model is None and request.prompt is not None:
            request = replace(request, model=self._only_model())
        if request.model is None:
            return request, None
        name = self._fleet.aliases.get(request.model, request.model)
        if name != request.model:  # of a question about a request, which is not sent
            request = replace(request, model=name)
        if request.adapter is not None and self._fleet.model_of(qualified := f"{name}:{request.adapter}") is not None:
            name = qualified
            request = replace(request, model=name)
        model = self._fleet.model_of(name)
        if model is None and not self._fleet.awaits(name):
            if not self._forwards_unknown:
                raise unknown_model(self._fleet, name)
            request = replace(request, model=None)
        return request, model

    def _only_model(self) -> str | None:
        described = [worker.description for worker in self._fleet.generating if worker.description]
        models = {model.name for description in described for model in description.base_models()}
        return models.pop() if len(models) == 1 else None


def _routed_by_load(request: RoutedRequest, body_bytes: int, error: Exception) -> RoutedPrompt:
    """Return a prompt that is routed by load alone. The worker answers if it is invalid."""
    log.debug("routed by load alone", model=request.model, reason=str(error))
    return unread_prompt(request, body_bytes)
