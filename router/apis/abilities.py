"""Abilities that requests need beyond their model: media, tools and structured output.

Replicas of one model can differ in them. A worker lacks what its engine reports, or what its 400 says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvevents.decoding import read_json
from router.apis.body_fields import MediaFields
from router.apis.json_edit import OutlineField, read_outline
from router.apis.media_parts import parts_in


class Ability(StrEnum):
    """An ability of an engine that depends on its model and its flags."""

    IMAGES = "images"
    AUDIO = "audio"
    VIDEO = "video"
    TOOLS = "tools"
    STRUCTURED_OUTPUT = "structured_output"


NO_ABILITIES: Final[frozenset[Ability]] = frozenset()

# Keys and types of media. Quotes in texts are escaped, so that no text has them.
_MEDIA: Final = {
    Ability.IMAGES: (b'"image_url"', b'"input_image"', b'"image"', b'"image_data"', b'"image_embeds"', b'"image_pil"'),
    Ability.AUDIO: (b'"input_audio"', b'"audio_url"', b'"audio_data"', b'"audio_embeds"'),
    Ability.VIDEO: (b'"video_url"', b'"video_data"', b'"video_embeds"'),
}


class _Constraints(msgspec.Struct):
    """Fields that constrain an answer, which SGLang's `/generate` has in `sampling_params`."""

    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class _Fields(_Constraints):
    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    response_format: Any = None
    text: Any = None
    sampling_params: Any = None


_NAMES: Final = frozenset(b'"%b"' % name.encode() for name in _Fields.__struct_fields__)
_MARKS: Final = tuple(_NAMES - {b'"tool_choice"'})


def needed_abilities(body: bytes) -> frozenset[Ability]:
    """Return the abilities that a request with this JSON body needs."""
    try:
        outline = read_outline(body)
    except ValueError:
        return NO_ABILITIES  # engines refuse it
    names = body if outline is None else outline.text
    needed = {ability for ability, marks in _MEDIA.items() if any(mark in names for mark in marks)}
    if outline is not None:  # without types of parts; Anthropic's images have only a type
        if b'"source"' in names and any(isinstance(part.get("source"), dict) for part in _messages(names)):
            needed.add(Ability.IMAGES)
        named = [body[each.name_start : each.end] for each in outline.fields if _name(body, each) in _NAMES]
        body = b"{%b}" % b",".join(named)
    if any(mark in body for mark in _MARKS):
        try:
            fields = read_json(body, _Fields)
        except msgspec.DecodeError:
            return frozenset(needed)
        if (fields.tools or fields.functions) and fields.tool_choice != "none":
            needed.add(Ability.TOOLS)
        if _is_structured(fields):
            needed.add(Ability.STRUCTURED_OUTPUT)
    return frozenset(needed)


def _name(body: bytes, field: OutlineField) -> bytes:
    return body[field.name_start : field.name_end]


def _messages(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the messages of a body and the parts in them."""
    try:
        return parts_in(read_json(text, MediaFields).messages)
    except msgspec.DecodeError:
        return iter(())


def _is_structured(fields: _Fields) -> bool:
    text = fields.text.get("format") if isinstance(fields.text, dict) else None
    formats = [each.get("type") for each in (fields.response_format, text) if isinstance(each, dict)]
    if any(kind not in (None, "text") for kind in formats):
        return True
    sampling = fields.sampling_params if isinstance(fields.sampling_params, dict) else {}
    names = _Constraints.__struct_fields__
    return any(getattr(fields, name) is not None or sampling.get(name) is not None for name in names)


_NO_MEDIA: Final = re.compile(rb"At most 0 (image|audio|video)")
_MODALITIES: Final = {b"image": Ability.IMAGES, b"audio": Ability.AUDIO, b"video": Ability.VIDEO}


def refused_abilities(error: bytes, needed: Set[Ability]) -> frozenset[Ability]:
    """Return which abilities an engine says it lacks in the error of a 400, of those that the request needs."""
    lacks: set[Ability] = set()
    if b"--tool-call-parser" in error:
        lacks.add(Ability.TOOLS)
    if b"not a multimodal model" in error:
        lacks.update(_MODALITIES.values())
    if found := _NO_MEDIA.search(error):
        lacks.add(_MODALITIES[found[1]])
    return frozenset(lacks & needed)


class _ModelInfo(msgspec.Struct):
    has_image_understanding: Any = None
    has_audio_understanding: Any = None


class _ServerInfo(msgspec.Struct):
    tool_call_parser: Any = ""
    grammar_backend: Any = None


def sglang_lacks(server_info: bytes, model_info: bytes | None) -> frozenset[Ability]:
    """Return which abilities an SGLang server reports that it lacks. Raises msgspec.MsgspecError for other JSON."""
    server = read_json(server_info, _ServerInfo)
    model = _ModelInfo() if model_info is None else read_json(model_info, _ModelInfo)
    reported = {
        Ability.IMAGES: model.has_image_understanding is False,
        Ability.VIDEO: model.has_image_understanding is False,
        Ability.AUDIO: model.has_audio_understanding is False,
        Ability.TOOLS: server.tool_call_parser is None,
        Ability.STRUCTURED_OUTPUT: server.grammar_backend == "none",
    }
    return frozenset(ability for ability, lacks in reported.items() if lacks)
