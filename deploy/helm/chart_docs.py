"""Writes the chart's values.schema.json and README.md, both from the comments in values.yaml.

A comment above a key describes it. `# @schema {…}` behind the key adds to its JSON schema, in YAML. A map whose first
key has no comment is a value of its own, such as resources. The schema of `config` is that of the router's settings,
without what is secret, described by the comments in config.yaml.

`python deploy/helm/chart_docs.py` writes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from router.settings import Settings

CHART = Path(__file__).parent / "kvrouter"
CONFIG = Path(__file__).parents[2] / "config.yaml"

# What a ConfigMap must not hold, and the value of the chart that takes its place.
SECRET_SETTINGS = {
    ("ServerSettings", "token"): "secrets.adminToken",
    ("IndexSettings", "secret"): "secrets.indexSecret",
    ("FleetSettings", "api_key"): "secrets.workerApiKey",
    ("WorkerSettings", "api_key"): "api_key_file or api_key_env, or secrets.workerApiKey",
    ("TenantsSettings", "named"): "secrets.tenants",
    ("ReplicasSettings", "redis"): "redis",
}

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w.-]*):(?: (?P<rest>.*))?$")
_SCHEMA = re.compile(r" *# @schema (?P<schema>{.*})$")
_SETTING = re.compile(r"^ +(?P<key>\w+):(?:.*? # (?P<comment>.*))?")
_EXAMPLE = re.compile(r"^# +(?:- )?(?P<key>\w+):.*? # (?P<comment>.*)$")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass
class Value:
    """A key of values.yaml."""

    path: tuple[str, ...]
    description: str
    default: Any
    extra: dict[str, Any]
    children: list[Value] = field(default_factory=list)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the key. Raises ValueError if its type is unknown."""
        if "$ref" in self.extra:
            return {"description": self.description} | self.extra
        schema: dict[str, Any] = {"description": self.description}
        if self.children:
            properties = {child.path[-1]: child.schema() for child in self.children}
            return schema | {"type": "object", "additionalProperties": False, "properties": properties} | self.extra
        if self.default is None and "type" not in self.extra:
            raise ValueError(f"{'.'.join(self.path)}: a default of null has no type: add # @schema {{type: …}}")
        return schema | ({} if self.default is None else {"type": _TYPES[type(self.default)]}) | self.extra

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield name, type, default and description of the key and of the keys in it."""
        if self.children:
            yield ".".join(self.path), "", "", self.description
            for child in self.children:
                yield from child.rows()
        else:
            kind = self.schema().get("type", "object")
            default = json.dumps(self.default, ensure_ascii=False)
            yield ".".join(self.path), " or ".join(kind) if isinstance(kind, list) else kind, default, self.description


def read_values(path: Path) -> list[Value]:
    """Return the keys of a values file with their comments. Raises ValueError for a key without one."""
    text = path.read_text()
    defaults = yaml.safe_load(text)
    top: list[Value] = []
    open_maps: list[tuple[int, Value | None]] = [(-1, None)]
    opaque: int | None = None  # the indent of a value without keys of its own
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        found = _KEY.match(line)
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif found is None:
            comment = []
        else:
            indent, key = len(found["indent"]), found["key"]
            if opaque is not None and indent > opaque:
                continue
            while open_maps[-1][0] >= indent:
                open_maps.pop()
            parent = open_maps[-1][1]
            if not comment:
                if parent is None or parent.children:
                    raise ValueError(f"{path.name}: {key}: every value needs a comment above it")
                opaque = open_maps[-1][0]
                continue
            opaque = None
            place = (*(parent.path if parent else ()), key)
            default = defaults
            for name in place:
                default = default[name]
            marked = _SCHEMA.search(found["rest"] or "")
            value = Value(place, " ".join(comment), default, yaml.safe_load(marked["schema"]) if marked else {})
            (parent.children if parent else top).append(value)
            if "$ref" in value.extra:
                opaque = indent
            open_maps.append((indent, value))
            comment = []
    return top


def settings_definitions() -> dict[str, Any]:
    """Return the JSON schema of the router's settings by section, without secrets."""
    schema = Settings.model_json_schema()
    definitions: dict[str, Any] = schema.pop("$defs")
    definitions["Settings"] = schema
    comments = _setting_comments(CONFIG.read_text())
    for name, definition in definitions.items():
        section = definition.get("description", name).split("\n\n")[0].replace("\n", " ")
        definition["description"] = section
        for key, value in list(definition.get("properties", {}).items()):
            if (name, key) in SECRET_SETTINGS:
                del definition["properties"][key]
                continue
            value.pop("title", None)
            reference = str(value.get("$ref", "")).rpartition("/")[2]
            description = comments.get((_section_of(schema, name), key)) or comments.get(("", key))
            description = description or definitions.get(reference, {}).get("description")
            value["description"] = description or f"`{key}` of: {section}"
        definition.pop("title", None)
    used = json.dumps(definitions)
    return {name: each for name, each in definitions.items() if name == "Settings" or f'/$defs/{name}"' in used}


def _section_of(schema: dict[str, Any], definition: str) -> str:
    """Return the key of config.yaml that holds a definition's fields."""
    for key, value in schema["properties"].items():
        if f'/$defs/{definition}"' in json.dumps(value):
            return str(key)
    return ""


def _setting_comments(text: str) -> dict[tuple[str, str], str]:
    """Return the comments in config.yaml by section and key. Comments of sections and examples have no section."""
    comments: dict[tuple[str, str], str] = {}
    section, above = "", ""
    for line in text.splitlines():
        if example := _EXAMPLE.match(line):
            comments.setdefault(("", example["key"]), example["comment"])
        elif found := _SETTING.match(line):
            if found["comment"]:
                comments[section, found["key"]] = found["comment"]
        elif top := _KEY.match(line):
            section = top["key"]
            if above:
                comments["", section] = above
        above = f"{above} {line[2:]}".strip() if re.match(r"# \S", line) else above if line.startswith("#") else ""
    return comments


def values_schema(values: list[Value]) -> str:
    """Return the text of values.schema.json."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the kvrouter chart",
        "type": "object",
        "additionalProperties": False,
        "properties": {value.path[0]: value.schema() for value in values},
        "$defs": settings_definitions(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def readme(values: list[Value]) -> str:
    """Return the text of the chart's README.md."""
    lines = [
        "# kvrouter",
        "",
        "The chart installs the router on Kubernetes: see [docs/kubernetes.md](../../../docs/kubernetes.md).",
        "This page is generated from the comments in values.yaml.",
        "",
        "    helm install kvrouter deploy/helm/kvrouter --values my-values.yaml",
        "",
        "[ci/](ci) has profiles to start from.",
        "",
        "## Values",
        "",
        "| value | type | default | |",
        "|---|---|---|---|",
    ]
    for value in values:
        for name, kind, default, description in value.rows():
            shown = f"`{_cell(default)}`" if default else ""
            lines.append(f"| `{name}` | {kind} | {shown} | {_cell(description)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write both files."""
    values = read_values(CHART / "values.yaml")
    (CHART / "values.schema.json").write_text(values_schema(values))
    (CHART / "README.md").write_text(readme(values))


if __name__ == "__main__":
    main()
