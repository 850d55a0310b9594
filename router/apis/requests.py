"""The parsed request: its model, its prompt, and the other fields that decide where it is routed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.sessions import AgentHints


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
        self.call = None


Prompt: TypeAlias = TextPrompts | TokenPrompts | ChatPrompt


@dataclass(slots=True, init=False)
class RoutedRequest:
    """A parsed request. Without a `prompt` it is routed by load; without a `model` any worker can serve it.

    - `adapter`: SGLang's field for an adapter beside the model; other engines ignore it.
    - `max_tokens`: the limit for each of the `n` answers to a prompt; None is no limit.
    - `stored`: the id of a response, conversation or file that only its creator worker has.
    - `reads_cache`: false if the engine computes the whole prompt, whatever is cached.
    """

    model: str | None
    prompt: Prompt | None
    stream: bool
    cache_salt: str | None
    max_tokens: int | None
    n: int
    priority: int
    session: str | None
    stored: str | None
    reads_cache: bool
    other_prompts: bool
    hints: AgentHints | None
    adapter: str | None

    def __init__(
        self,
        model: str | None,
        prompt: Prompt | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        priority: int = 0,
        session: str | None = None,
        stored: str | None = None,
        reads_cache: bool = True,
        other_prompts: bool = False,
        hints: AgentHints | None = None,
        adapter: str | None = None,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.stream = stream
        self.cache_salt = cache_salt
        self.max_tokens = max_tokens
        self.n = n
        self.priority = priority
        self.session = session
        self.stored = stored
        self.reads_cache = reads_cache
        self.other_prompts = other_prompts
        self.hints = hints
        self.adapter = adapter


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """A request to `/match`: which targets have cached a prefix of this prompt."""

    model: str
    prompt: Prompt
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None
