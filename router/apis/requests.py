"""The record of a request, from its body to the choice of its target, and the forms of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from indexer import PoolHoldings
from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.abilities import NO_ABILITIES, Ability
from router.apis.agent_hints import AgentHints
from router.apis.identities import Identity
from router.http.headers import HeaderItems

_NO_PROMPTS: list[PackedPrompt] = []  # never changed


@dataclass(frozen=True, slots=True)
class Truncation:
    """A limit on a prompt's tokens: keep the last `tokens` ("left" cuts off the start) or the first ones ("right")."""

    tokens: int
    side: Literal["left", "right"] = "left"

    def apply(self, prompt: PackedPrompt) -> PackedPrompt:
        """Return the prompt's tokens within the limit."""
        if self.side == "right":
            return PackedPrompt(prompt.tokens[: self.tokens * TOKEN_BYTES])
        return PackedPrompt(prompt.tokens[max(0, len(prompt) - self.tokens) * TOKEN_BYTES :])


@dataclass(slots=True, init=False)
class TextPrompts:
    """Prompts to tokenize as plain text; one sequence each."""

    texts: list[str]
    add_special_tokens: bool
    truncation: Truncation | None

    def __init__(self, texts: list[str], add_special_tokens: bool = True, truncation: Truncation | None = None) -> None:
        self.texts = texts
        self.add_special_tokens = add_special_tokens
        self.truncation = truncation


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts as token ids (empty for embeddings, which have no tokens), from the body's field `param`."""

    token_ids: list[list[int]]
    truncation: Truncation | None = None
    param: str = "prompt"


@dataclass(slots=True, init=False)
class ChatPrompt:
    """A conversation, and all that changes how the chat template renders it. The messages are kept unchanged.

    - `merges_system`: join later system messages into the first, where the template accepts only one at the start.
    - `thinking_off`: the client disables thinking, which templates express in two ways.
    - `reasoning`, `tool_choice`: fields that change the prompt in SGLang alone.
    - `call`: the request's path and body, for tokenization by an engine.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    truncation: Truncation | None
    merges_system: bool
    thinking_off: bool
    media_options: dict[str, Any] | None
    reasoning: dict[str, Any] | None
    tool_choice: Any
    call: tuple[str, bytes] | None = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        merges_system: bool = False,
        thinking_off: bool = False,
        media_options: dict[str, Any] | None = None,
        reasoning: dict[str, Any] | None = None,
        tool_choice: Any = None,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.documents = documents
        self.reasoning_effort = reasoning_effort
        self.chat_template = chat_template
        self.chat_template_kwargs = chat_template_kwargs
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.add_special_tokens = add_special_tokens
        self.truncation = truncation
        self.merges_system = merges_system
        self.thinking_off = thinking_off
        self.media_options = media_options
        self.reasoning = reasoning
        self.tool_choice = tool_choice
        self.call = None


UsualChat: TypeAlias = tuple[str, list[dict[str, Any]], bool, int | None]
"""A chat whose messages are texts, without fields that change its prompt: model, messages, streamed, max_tokens."""

Prompt: TypeAlias = TextPrompts | TokenPrompts | ChatPrompt


@dataclass(frozen=True, slots=True)
class Turn:
    """The own part of a request: its messages and settings as JSON.

    - `previous`: the id of the response that it continues; None for a first turn.
    - `instructed`: whether the first message has the request's instructions.
    """

    previous: str | None
    messages: bytes
    settings: bytes
    instructed: bool


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request, for custom policies: its tenant ("" without tenants), and the headers."""

    tenant: str
    headers: HeaderItems


@dataclass(slots=True, init=False)
class RoutedRequest:
    """A request as routing sees it. Its fields are filled in this order.

    Read from its head and its body:

    - `name`: the model or adapter it asks for; None: any.
    - `prompt`: None for requests that are routed by load. It is dropped once the request is admitted.
    - `max_tokens`: the limit for each of the `answers` to a prompt; None is no limit.
    - `identity`: its caller; None if it names none. `session` is the session that its placement uses.
    - `stored`: the id of a response, conversation or file that only its creator worker has.
    - `reads_cache`: false if the engine computes the whole prompt, whatever is cached.
    - `adapter`: SGLang's field for an adapter beside the model; other engines ignore it.
    - `billing_line`: whether its body has the billing line of Claude Code, without which its prompt is matched.

    Found for its name:

    - `model`: the model behind the name; None if any worker will do.
    - `unknown_name`: whether it asks for a name that no worker serves, which an engine may load.

    Read from its prompt:

    - `tokens`: the tokens of its prompts; an estimate if not all of them are known.
    - `token_ids`: the tokens that the engine computes.
    - `identities`: the same, with marks where only the engine knows the tokens, such as those of images.
    - `exact`: whether the engine is expected to compute exactly these tokens.
    - `by_text`: whether `identities` are bytes of text instead of tokens.
    - `turn`: its part of a conversation that later requests may continue by the id of its response.
    - `verified`: what pools of unknown content have of it, as they answered before the choice.

    Set before the choice:

    - `needs`: the abilities that it needs, as far as workers differ in them.
    - `dp_rank`: the only DP rank that may receive it; None: any.
    - `encoding`: the predicted seconds until encode workers have encoded its media.
    - `sender`: its sender; None if no policy reads it.
    """

    name: str | None
    prompt: Prompt | None
    streamed: bool
    cache_salt: str | None
    max_tokens: int | None
    answers: int
    priority: int
    identity: Identity | None
    session: str | None
    stored: str | None
    reads_cache: bool
    other_prompts: bool
    hints: AgentHints | None
    adapter: str | None
    billing_line: bool
    path: str = field(compare=False)
    model: str | None
    unknown_name: bool
    tokens: int
    token_ids: list[PackedPrompt]
    identities: list[PackedPrompt]
    exact: bool
    by_text: bool
    turn: Turn | None
    verified: tuple[PoolHoldings, ...]
    needs: frozenset[Ability]
    dp_rank: int | None
    encoding: float
    sender: Sender | None

    def __init__(
        self,
        name: str | None,
        prompt: Prompt | None = None,
        streamed: bool = False,
        cache_salt: str | None = None,
        max_tokens: int | None = None,
        answers: int = 1,
        priority: int = 0,
        identity: Identity | None = None,
        stored: str | None = None,
        reads_cache: bool = True,
        other_prompts: bool = False,
        hints: AgentHints | None = None,
        adapter: str | None = None,
        path: str = "",
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.streamed = streamed
        self.cache_salt = cache_salt
        self.max_tokens = max_tokens
        self.answers = answers
        self.priority = priority
        self.identity = identity
        self.session = None if identity is None else identity.session
        self.stored = stored
        self.reads_cache = reads_cache
        self.other_prompts = other_prompts
        self.hints = hints
        self.adapter = adapter
        self.billing_line = False
        self.path = path
        self.model = None
        self.unknown_name = False
        self.tokens = 0
        self.token_ids = self.identities = _NO_PROMPTS
        self.exact = self.by_text = False
        self.turn = None
        self.verified = ()
        self.needs = NO_ABILITIES
        self.dp_rank = None
        self.encoding = 0.0
        self.sender = None

    def tokenized(self, token_ids: list[PackedPrompt], identities: list[PackedPrompt] | None = None) -> RoutedRequest:
        """Set the tokens of its prompts, and return it. `identities`: None if they are the token ids."""
        if identities is None:
            identities = token_ids
        self.token_ids, self.identities = token_ids, identities
        self.tokens = sum([identity.length for identity in identities])
        self.exact = identities is token_ids and self.stored is None and not self.other_prompts
        return self

    def estimated(self, tokens: int) -> RoutedRequest:
        """Set the number of its tokens, of which no more is known, and return it: it is routed by load alone."""
        self.tokens = tokens
        return self

    @property
    def context(self) -> int:
        """The tokens of the longest prompt and its answer, which a model's context must hold."""
        prompt = max([identity.length for identity in self.identities], default=0) or self.tokens
        return prompt + max(self.max_tokens or 1, 1)


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """A request to `/match`: which targets have cached a prefix of this prompt."""

    model: str
    prompt: Prompt
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None
