"""The reading of requests: the model behind the name, and the tokens of the prompts."""

from __future__ import annotations

import time
from contextlib import suppress

import structlog

from http_api.errors import RequestError
from indexer import Indexer, MatchQuery
from indexer.hashing import PackedPrompt
from router.apis.endpoints import RESPONSES
from router.apis.requests import ChatPrompt, Prompt, RoutedRequest
from router.fleet.fleet import Fleet
from router.routing.pool_verifier import PoolVerifier
from router.routing.state import RoutingState
from router.routing.target_directory import unknown_model
from router.tokens.text_prefixes import text_prefixes
from router.tokens.tokenizers import OnTrialError, Tokenizers, TokenizerUnavailableError

log = structlog.get_logger()

# Bytes per token of English text, to estimate the tokens of prompts that are not tokenized.
BYTES_PER_TOKEN = 4
_NO_TOKENS = PackedPrompt(b"")


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

        - `state`: its `needs_prompts` is true while the policy or a recording reads prompts.
        - `forwards_unknown`: requests for unknown names are forwarded and not refused.
        - `verifier`: asks pools of unknown content about prompts; None without pools.
        """
        self.state = state
        self._fleet = fleet
        self._indexer = indexer
        self._tokenizers = tokenizers
        self._forwards_unknown = forwards_unknown
        self._verifier = verifier

    def require_prompts(self, wanted: bool) -> None:
        """Set whether anything beside the policy reads prompts."""
        self.state.needs_prompts = wanted or self.state.policy.spec.reads_prompts

    def resolve(self, name: str, tenant: str) -> tuple[str, str | None]:
        """Return the model and adapter behind a name. Raises RequestError (404) if no worker serves it."""
        name = self._fleet.aliases.get(name, name)
        serving = self._fleet.serving(name)
        if serving:
            return serving[0][1].model, serving[0][1].adapter
        if self._indexer.serves(name, tenant):
            return name, None
        raise unknown_model(self._fleet, name)

    async def read(self, request: RoutedRequest, body_bytes: int) -> None:
        """Tokenize a request's prompts. Raises RequestError for an unknown model and for an invalid prompt."""
        if not self.read_now(request, body_bytes):
            await self.read_aside(request, body_bytes)

    def read_now(self, request: RoutedRequest, body_bytes: int) -> bool:
        """Find a request's model, and tokenize its prompts if that does not block. If not, `read_aside` must.

        Raises RequestError for a model that no worker serves.
        """
        self._find_model(request)
        if not self.state.needs_prompts or request.model is None or request.prompt is None:
            request.estimated(body_bytes // BYTES_PER_TOKEN)
            return True
        if request.path == RESPONSES:
            self._add_earlier_turns(request, request.prompt, request.model)
        try:
            tokenized = self._tokenizers.tokenize_now(request.model, request.prompt, body_bytes)
        except (RequestError, TokenizerUnavailableError) as error:
            self._without_tokens(request, body_bytes, error)
            return True
        if tokenized is None or (self._verifier is not None and self._verifier.is_due):
            return False
        request.tokenized(*tokenized)
        return True

    async def read_aside(self, request: RoutedRequest, body_bytes: int) -> None:
        """Tokenize the prompts that `read_now` did not, in a thread or by a worker. Raises RequestError."""
        model = request.model
        if model is None or request.prompt is None:
            return
        try:
            request.tokenized(*await self._tokenizers.tokenize_aside(model, request.prompt))
        except (RequestError, TokenizerUnavailableError) as error:
            self._without_tokens(request, body_bytes, error)
            return
        if self._verifier is not None and request.name is not None and len(request.token_ids) == 1:
            serving = self._fleet.serving(request.name)
            adapter = serving[0][1].adapter if serving else None
            query = MatchQuery(model, request.token_ids[0], adapter, request.cache_salt)
            request.verified = await self._verifier.verified(query)

    def _add_earlier_turns(self, request: RoutedRequest, prompt: Prompt, model: str) -> None:
        """Add the turns before a request to its prompt, and its own turn if it is for a response that may be stored."""
        if isinstance(prompt, ChatPrompt):
            keeps_items = self._tokenizers.keeps_items(model)
            request.prompt, request.turn = self.state.turns.begin(prompt, request.stored, keeps_items)

    def _without_tokens(self, request: RoutedRequest, body_bytes: int, error: Exception) -> None:
        """Route a request whose prompt was not tokenized by its text or by load. The worker answers if it is invalid.

        No event reports the blocks of a text (router/tokens/text_prefixes.py).
        """
        assert request.model is not None
        assert request.prompt is not None
        request.turn = None
        begun, way = time.perf_counter(), "routed by load alone"
        request.estimated(body_bytes // BYTES_PER_TOKEN)
        if isinstance(error, TokenizerUnavailableError) and not isinstance(error, OnTrialError):
            with suppress(TokenizerUnavailableError):
                texts = text_prefixes(request.prompt)
                self._tokenizers.count_text(request.model, begun)
                request.tokenized([_NO_TOKENS] * len(texts), texts)
                request.by_text, way = True, "routed by its text"
        log.debug(way, model=request.name, reason=str(error))

    def _find_model(self, request: RoutedRequest) -> None:
        """Resolve a request's name, and find the model behind it."""
        fleet = self._fleet
        if request.name is None and request.prompt is not None:
            request.name = self._only_model()
        if request.name is None:
            return
        name = fleet.aliases.get(request.name, request.name)  # of a question about a request, which is not sent
        if request.adapter is not None and fleet.model_of(qualified := f"{name}:{request.adapter}") is not None:
            name = qualified
        request.name, request.model = name, fleet.model_of(name)
        if request.model is None and not fleet.awaits(name):
            if not self._forwards_unknown:
                raise unknown_model(fleet, name)
            request.name, request.unknown_name = None, True

    def _only_model(self) -> str | None:
        described = [worker.description for worker in self._fleet.generating if worker.description]
        models = {model.name for description in described for model in description.base_models()}
        return models.pop() if len(models) == 1 else None
