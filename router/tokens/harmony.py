"""gpt-oss: engines render its chats by the library harmony, whatever template lies in the model's folder.

Two packages bring the library: oss-harmony, which newer vLLM uses and which has its vocabulary in it, and the older
openai-harmony, which loads that over the network, or from the folder that TIKTOKEN_ENCODINGS_BASE names.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from http_api.errors import RequestError
from indexer.hashing import pack_tokens
from router.apis.requests import ChatPrompt
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.long_words import exceeds_work, strings_in, word_pattern

Message = dict[str, Any]
# More than any model of the family takes; and what takes a tenth of a second.
_MOST_CHARACTERS = 2**20
_MOST_WORK = 2 * 10**8


class Harmony:
    """Makes of chats what vLLM makes of them for gpt-oss. Any number of threads may use one."""

    truncates = False  # vLLM leaves `truncate_prompt_tokens` aside here

    def __init__(self) -> None:
        """Slow: call it in a thread. Raises TokenizerUnavailableError."""
        try:
            import openai_harmony
        except ImportError as error:
            raise TokenizerUnavailableError("gpt-oss wants another package: pip install 'kvrouter[harmony]'") from error
        self._library: Any = openai_harmony
        try:
            self._encoding: Any = openai_harmony.load_harmony_encoding(
                openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
            )
        except Exception as error:  # of its own kinds
            raise TokenizerUnavailableError(
                f"harmony cannot load its vocabulary ({error}): install oss-harmony, which has it, or name the folder "
                "of o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE"
            ) from error
        names = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")
        self._marks = [self._encoding.encode(name, allowed_special="all")[0] for name in names]
        efforts = openai_harmony.ReasoningEffort
        word_pattern()  # else the first long prompt waits for it
        self._efforts: dict[str, Any] = {"low": efforts.LOW, "medium": efforts.MEDIUM, "high": efforts.HIGH}

    def encode(self, chat: ChatPrompt) -> bytes:
        """The packed token ids of a conversation. Raises RequestError (400) for what gpt-oss has no form for.

        And TokenizerUnavailableError for what would take too long: the library lets no other thread run meanwhile.
        """
        texts = list(strings_in([chat.messages, chat.tools]))
        if sum(map(len, texts)) > _MOST_CHARACTERS or exceeds_work(texts, _MOST_WORK):
            raise TokenizerUnavailableError("harmony would take too long over a prompt as long, or of as long words")
        try:
            return self._encoded(chat)
        except RequestError:
            raise
        except Exception as error:  # whatever the library raises for what it was not written for
            raise RequestError(f"gpt-oss has no form for this: {error}", param="messages") from error

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
        for message in messages:
            made += self._of_message(message, names)
        tokens = self._encoding.render_conversation_for_completion(
            library.Conversation.from_messages(_without_old_thoughts(made)),
            library.Role.ASSISTANT,
            config=library.RenderConversationConfig(auto_drop_analysis=False),
        )
        return pack_tokens(self._with_older_headers(tokens))

    def _with_older_headers(self, tokens: list[int]) -> list[int]:
        """With calls of functions as the model was trained with, and vLLM shows them: the recipient first."""
        start, message, channel, constrain = self._marks
        made: list[int] = []
        place, last = 0, max((at for at, token in enumerate(tokens) if token == message), default=0)
        while place < len(tokens):
            end = tokens.index(message, place) if tokens[place] == start and place < last else 0
            header = tokens[place + 1 : end] if end else []
            if channel in header and constrain in header[header.index(channel) :]:
                author = self._encoding.decode(header[: header.index(channel)])
                said = self._encoding.decode(header[header.index(channel) + 1 : header.index(constrain)])
                kind = self._encoding.decode(header[header.index(constrain) + 1 :])
                name, _, recipient = said.strip().partition(" to=")
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

    def _of_message(self, message: Message, names: dict[Any, Any]) -> Iterator[Any]:
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
        make, reasoning = self._library.Message.from_role_and_content, message.get("reasoning")
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
            if role != "assistant" or (texts and texts[0]):
                said = self._library.Message.from_role_and_contents(role, contents)
                yield said.with_channel("final") if role == "assistant" else said


def _text(content: Any) -> str | None:
    """The texts of a content as one; None where there are none."""
    if content is None or isinstance(content, str):
        return content
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    found = [text for text in texts if text is not None]
    return "".join(found) if found else None


def _without_old_thoughts(messages: list[Any]) -> list[Any]:
    """Without what was thought before the last answer that was given."""
    last = max(
        (place for place, each in enumerate(messages) if each.author.role == "assistant" and each.channel == "final"),
        default=-1,
    )
    return [each for place, each in enumerate(messages) if place >= last or each.channel != "analysis"]
