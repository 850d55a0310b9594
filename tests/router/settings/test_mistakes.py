"""Mistakes in settings are described in the project's own words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.settings import ConfigError, Settings, load_settings
from router.settings.fields import FORMS

CONFIG_YAML = Path(__file__).parents[3] / "config.yaml"
LIBRARY = re.compile(
    r"Input should|Value error|Field required|dictionary|instance of|String should|\[type=|parse string"
)
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "wrong value", [], [1], {"a": 1}, "x" * 3000)


def every_place(fields: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every setting of config.yaml."""
    places = []
    for name, value in fields.items():
        places.append((*above, name))
        if isinstance(value, dict):
            places += every_place(value, (*above, name))
    return places


def refusal(given: Any) -> str:
    """Return the message for these settings; "" if they are accepted."""
    try:
        load_settings(None, given)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_wrong_value_is_described_in_own_words() -> None:
    messages = []
    for place in every_place(yaml.safe_load(CONFIG_YAML.read_text())):
        for wrong in WRONG:
            given: Any = wrong
            for name in reversed(place):
                given = {name: given}
            messages.append(refusal(given))
    assert sum(map(bool, messages)) > 500
    assert [each for each in messages if LIBRARY.search(each) or "not accepted" in each] == []


def patterns(schema: Any) -> set[str]:
    """Return the patterns in a JSON schema."""
    if isinstance(schema, list):
        return set().union(*map(patterns, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own | set().union(*map(patterns, schema.values()))


def test_every_pattern_has_words() -> None:
    found = patterns(Settings.model_json_schema())
    assert found
    assert found <= set(FORMS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: ['http://w:1']", "workers.0: expected a mapping: write `url: http://w:1` (found 'http://w:1')"),
        ("workers: http://w:1", "workers: expected a list: write `- url: http://w:1` (found 'http://w:1')"),
        ("workers: ['http://u:p@w:1']", "workers.0: expected a mapping: write `url: …` (the value is hidden)"),
        ("policy: random", "policy: expected a mapping: write `name: random` (found 'random')"),
        ("server:", "server: expected a mapping (found nothing)"),
        ("workers: [{name: a}]", "workers.0.url: is missing"),
        ("workers: [{url: 'w:8000'}]", "workers.0.url: no scheme: write http://w:8000 (found 'w:8000')"),
        ("server:\n\tport: 1", "line 2: not YAML at column 1 of 'port: 1'; indent by spaces, not by tabs"),
        ("server: {port: 1", "line 1: not YAML at column 17 of 'server: {port: 1'"),
        ("server: {token: t0p, port", "line 1: not YAML at column 26"),
    ],
)
def test_plain_mistakes_get_plain_answers(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    assert str(refused.value) == f"{file}: {message}"


@pytest.mark.parametrize("given", ["kv-aware", "KV_AWARE", "kvaware"])
def test_name_of_a_policy_that_is_meant_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--policy: unknown name; did you mean kv_aware\? "):
        load_settings(None, {"policy": {"name": given}})
