"""Requests to `/v1/chat/completions`, `/v1/completions` and `/match`, which accepts the prompts of both."""

from __future__ import annotations

from http_api.errors import RequestError
from router.apis.agent_hints import hints_in_body
from router.apis.body_fields import GenerationFields, MatchFields, PromptFields, SessionFields
from router.apis.fields import (
    adapter_of,
    has_unlike_adapters,
    kind_of,
    kinds_of,
    model_name,
    optional_string,
    read_body,
    salt_with,
    token_ids,
)
from router.apis.identities import find_identity
from router.apis.messages import media_options
from router.apis.requests import (
    ChatPrompt,
    MatchRequest,
    Prompt,
    RoutedRequest,
    TextPrompts,
    TokenPrompts,
    Truncation,
    UsualChat,
)
from router.http.headers import HeaderItems

# OpenAI's default for /v1/completions; chats have no default.
COMPLETION_MAX_TOKENS = 16

_NO_OPTIONS = (None, None)
_NO_SESSION = SessionFields()


def decode_chat(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing needs of a chat. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, GenerationFields)
    model = model_name(fields.model)
    _check_chat(fields)
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    # An echoed chat also returns the probabilities of its tokens: `top_logprobs` is 0 by default.
    return _request(fields, headers, model, _chat_prompt(fields), max_tokens, bool(fields.echo))


def usual_chat(chat: UsualChat, headers: HeaderItems = ()) -> RoutedRequest:
    """Return the request of a usual chat, which the check of its body has read."""
    model, messages, streamed, max_tokens = chat
    identity = find_identity(headers, _NO_SESSION) if headers else None
    return RoutedRequest(model, ChatPrompt(messages), streamed, None, max_tokens, identity=identity)


def decode_completion(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing needs of a completion. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, GenerationFields)
    model = model_name(fields.model)
    prompt = TokenPrompts([]) if fields.prompt_embeds and not fields.prompt else _prompt(fields)
    max_tokens = COMPLETION_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    return _request(fields, headers, model, prompt, max_tokens, bool(fields.echo) and fields.logprobs is not None)


def decode_match(body: bytes) -> MatchRequest:
    """Parse the body of a `/match` request. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, MatchFields)
    model = model_name(fields.model)
    given = [name for name in ("token_ids", "prompt", "messages") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"Found {' and '.join(given) or 'no prompt'}. Send exactly one of token_ids, prompt and messages.",
            param=given[0] if given else "prompt",
        )
    prompt: Prompt
    if fields.messages is not None:
        _check_chat(fields)
        prompt = _chat_prompt(fields)
    elif fields.prompt is not None:
        prompt = _prompt(fields)
    else:
        prompt = TokenPrompts([token_ids(fields.token_ids, "token_ids")], _truncation(fields), "token_ids")
    return MatchRequest(
        model=model,
        prompt=prompt,
        lora_name=optional_string(fields.lora_name, "lora_name"),
        cache_salt=optional_string(fields.cache_salt, "cache_salt"),
        tenant_id=optional_string(fields.tenant_id, "tenant_id"),
    )


def _request(
    fields: GenerationFields,
    headers: HeaderItems,
    model: str,
    prompt: Prompt,
    max_tokens: int | None,
    echoes_logprobs: bool,
) -> RoutedRequest:
    """Build the request. `echoes_logprobs`: the whole prompt is computed (vLLM's `skip_reading_prefix_cache`)."""
    salt, adapters = fields.cache_salt, fields.lora_path
    if salt is not None or fields.extra_key:
        salt = salt_with(optional_string(salt, "cache_salt"), fields.extra_key)
    return RoutedRequest(
        name=model,
        prompt=None if adapters is not None and has_unlike_adapters(adapters) else prompt,
        streamed=fields.stream or False,
        cache_salt=salt,
        max_tokens=max_tokens,
        answers=max(fields.n or 1, fields.best_of or 1),
        priority=fields.priority or 0,
        identity=find_identity(headers, fields),
        hints=hints_in_body(fields.nvext),
        reads_cache=fields.prompt_logprobs is None and not echoes_logprobs,
        other_prompts=bool(fields.prompt_embeds or fields.extra_key),
        adapter=None if adapters is None else adapter_of(adapters),
    )


def _chat_prompt(fields: PromptFields) -> ChatPrompt:
    options = fields.mm_processor_kwargs, fields.media_io_kwargs
    effort, reasoning = fields.reasoning_effort, fields.reasoning
    if isinstance(effort, float) and not isinstance(reasoning, dict):  # only SGLang accepts a number
        reasoning = {"effort": effort}
    return ChatPrompt(
        messages=fields.messages,
        tools=fields.tools if isinstance(fields.tools, list) else None,
        documents=fields.documents if isinstance(fields.documents, list) else None,
        reasoning_effort=effort if isinstance(effort, str) else None,
        chat_template=fields.chat_template if isinstance(fields.chat_template, str) else None,
        chat_template_kwargs=fields.chat_template_kwargs if isinstance(fields.chat_template_kwargs, dict) else None,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message or False,
        add_special_tokens=fields.add_special_tokens or False,
        truncation=_truncation(fields),
        media_options=None if options == _NO_OPTIONS else media_options(*options),
        reasoning=reasoning if isinstance(reasoning, dict) else None,
        tool_choice=fields.tool_choice,
    )


def _check_chat(fields: PromptFields) -> None:
    """Refuse a chat that cannot be routed."""
    messages = fields.messages
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f'messages is {kind_of(messages)}. Send a list of messages: [{{"role": "user", "content": "…"}}].',
            param="messages",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(
                f'messages[{index}] is {kind_of(message)}. Send an object: {{"role": "user", "content": "…"}}.',
                param=f"messages[{index}]",
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}].role is {kind_of(message.get('role'))}. "
                'Send a string: "system", "user", "assistant" or "tool".',
                param=f"messages[{index}].role",
            )
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise RequestError(
                f"messages[{index}].content is {kind_of(content)}. "
                'Send a string or a list of parts: [{"type": "text", "text": "…"}].',
                param=f"messages[{index}].content",
            )
        for place, part in enumerate(content):
            if not isinstance(part, (dict, str)):
                raise RequestError(
                    f"messages[{index}].content[{place}] is {kind_of(part)}. "
                    'Send an object: {"type": "text", "text": "…"}.',
                    param=f"messages[{index}].content[{place}]",
                )


_PROMPT_FORMS = "Send a string, a list of strings, a list of token ids, or a list of lists of token ids."


def _prompt(fields: PromptFields) -> TextPrompts | TokenPrompts:
    prompt, truncation = fields.prompt, _truncation(fields)
    add_special_tokens = fields.add_special_tokens is not False
    if isinstance(prompt, str) and prompt:
        return TextPrompts([prompt], add_special_tokens, truncation)
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"prompt is {kind_of(prompt)}. {_PROMPT_FORMS}", param="prompt")
    types = set(map(type, prompt))
    if types == {str}:
        return TextPrompts(prompt, add_special_tokens, truncation)
    if types == {list}:
        lists = [token_ids(ids, f"prompt[{index}]") for index, ids in enumerate(prompt)]
        return TokenPrompts(lists, truncation)
    if list in types or dict in types:
        raise RequestError(f"prompt is a list of {kinds_of(prompt)}. {_PROMPT_FORMS}", param="prompt")
    return TokenPrompts([token_ids(prompt, "prompt", _PROMPT_FORMS)], truncation)


def _truncation(fields: PromptFields) -> Truncation | None:
    tokens = fields.truncate_prompt_tokens
    # -1 is the model's whole context. The worker refuses longer prompts.
    if tokens is None or tokens < 0:
        return None
    return Truncation(tokens, "right" if fields.truncation_side == "right" else "left")
