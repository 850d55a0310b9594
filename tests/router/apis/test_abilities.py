"""The abilities that a request needs. A long body is not searched as text, and needs the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.apis.abilities import Ability, needed_abilities
from router.apis.json_edit import LONG

TEXT = {"type": "text", "text": '"image_url" "tools"'}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"source": {}}}}}]


def with_part(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [TEXT, part]}]}


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        (with_part(), set()),
        (with_part(type="image_url", image_url={"url": "x"}), {Ability.IMAGES}),
        (with_part(type="image", source={"type": "url", "url": "x"}), {Ability.IMAGES}),
        (with_part(type="input_audio", input_audio={"data": "x"}), {Ability.AUDIO}),
        (with_part(video_url="x"), {Ability.VIDEO}),
        ({"text": "x", "image_data": "x"}, {Ability.IMAGES}),
        ({"tools": TOOLS}, {Ability.TOOLS}),
        ({"tools": TOOLS, "tool_choice": "none"}, set()),
        ({"response_format": {"type": "text"}}, set()),
        ({"response_format": {"type": "json_schema"}}, {Ability.STRUCTURED_OUTPUT}),
        ({"sampling_params": {"regex": "x"}}, {Ability.STRUCTURED_OUTPUT}),
    ],
)
def test_abilities_depend_on_fields_whatever_the_length(fields: dict[str, Any], needs: set[Ability]) -> None:
    for padding in ("", "x" * LONG):
        assert needed_abilities(json.dumps({"model": "m", **fields, "user": padding}).encode()) == needs
