"""What routing knows of a request once its body is read: the model, the prompt, and what else decides where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.agent_hints import AgentHints


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep only this many tokens of a prompt: its last ones ("left" cuts the start off) or its first ("right")."""

    tokens: int
    side: Literal["left", "right"] = "left"

    def of(self, prompt: PackedPrompt) -> PackedPrompt:
        """What is left of a prompt."""
        if self.side == "right":
            return PackedPrompt(prompt.tokens[: self.tokens * TOKEN_BYTES])
        return PackedPrompt(prompt.tokens[max(0, len(prompt) - self.tokens) * TOKEN_BYTES :])


@dataclass(slots=True, init=False)
class TextPrompts:
    """Prompts to tokenize as they are; one sequence each."""

    texts: list[str]
    add_special_tokens: bool
    truncation: Truncation | None

    def __init__(self, texts: list[str], add_special_tokens: bool = True, truncation: Truncation | None = None) -> None:
        self.texts = texts
        self.add_special_tokens = add_special_tokens
        self.truncation = truncation


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts that are token ids already; one list each. Empty when the prompts are embeddings, which have none.

    `param` is the body's field they came from.
    """

    token_ids: list[list[int]]
    truncation: Truncation | None = None
    param: str = "prompt"


@dataclass(slots=True, init=False)
class ChatPrompt:
    """A conversation and all that changes how the chat template renders it. The messages are kept whole.

    `merges_system`: where the template takes a system message only as the first, the others become part of it.
    `thinking_off`: the client wants no thinking, which templates are told in two ways. `call`: the path and the body
    that it came from, for an engine to read. `media_options`: the body's fields that change how media are processed.
    `tokenized`: by what, and what it became, for the same request once more.
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
    tokenized: tuple[Any, Any] | None = field(init=False, compare=False, repr=False)

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
        self.tokenized = None


Prompt: TypeAlias = TextPrompts | TokenPrompts | ChatPrompt


@dataclass(slots=True, init=False)
class RoutedRequest:
    """A request. Without a `prompt` it goes where the load is least, without a `model` to any worker.

    `max_tokens` bounds each of the `n` answers to a prompt; None is no bound. `session` is what the requests of one
    conversation or user have in common. `stored` is a response, a conversation, a file or the like that it is about,
    which only the worker that made it has. `reads_cache`: false for one that the engine computes from its start,
    whatever is cached. `other_prompts`: it has prompts beside these, which have no tokens. `hints`: what its
    body tells of the answer and the session.
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


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """A question to `/match`: who holds a prefix of this prompt?"""

    model: str
    prompt: Prompt
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None
