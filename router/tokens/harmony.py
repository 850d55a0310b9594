"""gpt-oss: engines render its chats with the library harmony, whatever template is in the model's folder.

Two packages provide the library. oss-harmony, which newer vLLM uses, includes its vocabulary. The older openai-harmony
loads the vocabulary over the network, or from the folder in TIKTOKEN_ENCODINGS_BASE.

The library splits a text into words: letters and their marks, white space, or other characters, up to one of another
kind. Its time grows with the square of a word's length, so the work of a prompt is estimated first.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from typing import Any

from http_api.errors import RequestError
from indexer.hashing import pack_tokens
from router.apis.endpoints import RESPONSES
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError

# Shorter texts take little time, whatever their content.
_SHORT = 4096


def exceeds_work(texts: Iterable[str], most: int) -> bool:
    """Return whether the sum of the squared word lengths in bytes exceeds `most`; short texts are not counted."""
    done = 0.0
    for text in texts:
        if len(text) <= _SHORT:
            continue
        of_a_square = (len(text.encode("utf-8", "replace")) / len(text)) ** 2
        for found in word_pattern().finditer(text):
            done += of_a_square * (found.end() - found.start()) ** 2
            if done > most:
                return True
    return False


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, except for names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


@cache
def word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word. The first call is slow: it classifies all characters of Unicode."""
    marks = "".join(
        char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) in ("Mn", "Mc", "Me")
    )
    # A word with thousands of marks is matched in parts, because matching blocks other threads.
    return re.compile(rf"[^\W\d_]+(?:[{marks}]+[^\W\d_]*){{0,8192}}|\s+|(?:[^\w\s]|_)+")


Message = dict[str, Any]
# Limits: more characters than any model of the family accepts, and work of a tenth of a second.
_MOST_CHARACTERS = 2**20
_MOST_WORK = 2 * 10**8


class Harmony:
    """An encoder that makes the same tokens of chats as vLLM does for gpt-oss. It can be used by several threads."""

    truncates = False  # vLLM ignores `truncate_prompt_tokens` here
    ignores_template = True
    keeps_items = True

    def __init__(self) -> None:
        """Load the library and its vocabulary. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        try:
            import openai_harmony
        except ImportError as error:
            raise TokenizerUnavailableError("gpt-oss needs another package: pip install 'kvrouter[harmony]'") from error
        self._library: Any = openai_harmony
        try:
            self._encoding: Any = openai_harmony.load_harmony_encoding(
                openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
            )
        except Exception as error:  # the library raises its own types
            raise TokenizerUnavailableError(
                f"harmony cannot load its vocabulary ({error}): install oss-harmony, which includes it, "
                "or set TIKTOKEN_ENCODINGS_BASE to the folder of o200k_base.tiktoken"
            ) from error
        names = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")
        self._marks = [self._encoding.encode(name, allowed_special="all")[0] for name in names]
        efforts = openai_harmony.ReasoningEffort
        word_pattern()  # otherwise the first long prompt waits for it
        self._efforts: dict[str, Any] = {"low": efforts.LOW, "medium": efforts.MEDIUM, "high": efforts.HIGH}

    def encode(self, chat: ChatPrompt) -> bytes:
        """Return the packed token ids of a conversation.

        Raises RequestError (400) if gpt-oss cannot represent it. Raises TokenizerUnavailableError if it would take too
        long, because the library blocks all other threads.
        """
        texts = list(strings_in([chat.messages, chat.tools]))
        if sum(map(len, texts)) > _MOST_CHARACTERS or exceeds_work(texts, _MOST_WORK):
            raise TokenizerUnavailableError("harmony would take too long: the prompt or its words are too long")
        try:
            return self._encoded(chat)
        except RequestError:
            raise
        except Exception as error:  # the library raises any type for unexpected messages
            raise RequestError(f"gpt-oss cannot represent this request: {error}", param="messages") from error

    def _encoded(self, chat: ChatPrompt) -> bytes:
        library, messages = self._library, chat.messages
        instructions = None
        if messages and messages[0]["role"] in ("system", "developer"):
            instructions, messages = _text(messages[0].get("content")), messages[1:]
        made = [self._system(chat.reasoning_effort)]
        if instructions or chat.tools:
            made.append(self._developer(instructions, chat.tools))
        names = {
            call.get("id"): call["function"].get("name")
            for message in messages
            for call in message.get("tool_calls") or []
        }
        items = chat.call is not None and chat.call[0] == RESPONSES
        for message in messages:
            for each in _items(message) if items else [message]:
                made += self._of_message(each, names, keeps_empty=items and "content" in each)
        tokens = self._encoding.render_conversation_for_completion(
            library.Conversation.from_messages(_without_old_thoughts(made)),
            library.Role.ASSISTANT,
            config=library.RenderConversationConfig(auto_drop_analysis=False),
        )
        return pack_tokens(self._with_older_headers(tokens))

    def _with_older_headers(self, tokens: list[int]) -> list[int]:
        """Return the tokens with function calls as in the model's training and in vLLM: the recipient first."""
        start, message, channel, constrain = self._marks
        made: list[int] = []
        place, last = 0, max((at for at, token in enumerate(tokens) if token == message), default=0)
        while place < len(tokens):
            end = tokens.index(message, place) if tokens[place] == start and place < last else 0
            header = tokens[place + 1 : end] if end else []
            if channel in header and constrain in header[header.index(channel) :]:
                author = self._encoding.decode(header[: header.index(channel)])
                role = self._encoding.decode(header[header.index(channel) + 1 : header.index(constrain)])
                kind = self._encoding.decode(header[header.index(constrain) + 1 :])
                name, _, recipient = role.strip().partition(" to=")
                if author == "assistant" and name and recipient and kind:
                    made += [start, *self._encoding.encode(f"assistant to={recipient}"), channel]
                    made += [*self._encoding.encode(f"{name} {kind}"), message]
                    place = end + 1
                    continue
            made.append(tokens[place])
            place += 1
        return made

    def _system(self, effort: str | None) -> Any:
        content = self._library.SystemContent.new()
        if effort is not None:
            if effort not in self._efforts:
                raise RequestError(
                    f"reasoning_effort is {effort!r}. Send low, medium or high.", param="reasoning_effort"
                )
            content = content.with_reasoning_effort(self._efforts[effort])
        content = content.with_conversation_start_date(datetime.now().strftime("%Y-%m-%d"))
        return self._library.Message.from_role_and_content(self._library.Role.SYSTEM, content)

    def _developer(self, instructions: str | None, tools: list[Any] | None = None) -> Any:
        content = self._library.DeveloperContent.new()
        if instructions is not None:
            content = content.with_instructions(instructions)
        if tools is not None:
            functions = [tool["function"] for tool in tools]
            content = content.with_function_tools(
                [
                    self._library.ToolDescription.new(
                        name=function["name"],
                        description=function.get("description") or "",
                        parameters=function.get("parameters"),
                    )
                    for function in functions
                ]
            )
        return self._library.Message.from_role_and_content(self._library.Role.DEVELOPER, content)

    def _of_message(self, message: Message, names: dict[Any, Any], keeps_empty: bool) -> Iterator[Any]:
        """Convert a chat message to harmony messages. `keeps_empty`: an answer without text is one."""
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
        make, reasoning = self._library.Message.from_role_and_content, message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if role == "assistant" and calls:
            if text := _text(content):
                yield make(role, text).with_channel("commentary")
            if reasoning:
                yield make(role, reasoning).with_channel("analysis")
            for call in calls:
                function = call["function"]
                called = make(role, function.get("arguments") or "").with_channel("commentary")
                yield called.with_recipient(f"functions.{function.get('name', '')}").with_content_type("json")
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "")
            author = self._library.Author.new(self._library.Role.TOOL, f"functions.{name}")
            result = self._library.Message.from_author_and_content(author, _text(content) or "")
            yield result.with_channel("commentary").with_recipient("assistant")
        elif role in ("system", "developer"):
            if (text := _text(content)) is not None:
                yield self._developer(text)
        else:
            if role == "assistant" and reasoning:
                yield make(role, reasoning).with_channel("analysis")
            texts = [content or ""] if not isinstance(content, list) else [part.get("text", "") for part in content]
            contents = [self._library.TextContent(text=text) for text in texts]
            if role != "assistant" or keeps_empty or (texts and texts[0]):
                said = self._library.Message.from_role_and_contents(role, contents)
                yield said.with_channel("final") if role == "assistant" else said


def _items(message: Message) -> list[Message]:
    """Return the items of /v1/responses that were joined to a message, in their order. vLLM converts each alone."""
    if message["role"] != "assistant":
        return [message]
    return [{"role": "assistant", key: value} for key, value in message.items() if key != "role"]


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    found = [text for text in texts if text is not None]
    return "".join(found) if found else None


def _without_old_thoughts(messages: list[Any]) -> list[Any]:
    """Return the messages without the reasoning before the last given answer."""
    last = max(
        (place for place, each in enumerate(messages) if each.author.role == "assistant" and each.channel == "final"),
        default=-1,
    )
    return [each for place, each in enumerate(messages) if place >= last or each.channel != "analysis"]
