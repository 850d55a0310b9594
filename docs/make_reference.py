"""Writes docs/reference/: settings, commands, HTTP API and alerts, each from what defines it.

`python docs/make_reference.py` writes the pages; a test says when they are not current.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from typer.models import ArgumentInfo, Context, OptionInfo

from kvrouter.cli import app as commands
from router.app.app import running_router
from router.observability.advice import ADVICE
from router.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = Path(__file__).parent / "reference"
ALERTS = ROOT / "deploy" / "helm" / "kvrouter" / "files" / "alerts.yaml"

_SECTION = re.compile(r"^(?P<key>\w+):")
_SETTING = re.compile(r"^ {2}(?P<key>\w+):(?:.*?\s# (?P<comment>.*))?")
_EXAMPLE = re.compile(r"^# +(?:- )?(?P<key>\w+):(?:.*?\s# (?P<comment>.*))?")
_TENANT = "named"  # the example below it shows a tenant

Schema = dict[str, Any]


# Settings


def config_page() -> str:
    """Return the page of settings: types and defaults of router/settings/, descriptions of config.yaml."""
    schema = Settings.model_json_schema()
    definitions = schema["$defs"]
    comments = _comments((ROOT / "config.yaml").read_text())
    lines = _head(
        "Settings",
        "Every setting of `kvrouter serve --config config.yaml`, made from router/settings/ and "
        "[config.yaml](../../config.yaml). Times are in seconds, sizes in tokens unless the name says otherwise. The "
        "environment wins over the file: `KVROUTER_SERVER__PORT=9000` is `server.port`. An unknown name is an error.",
    )
    for section, value in schema["properties"].items():
        definition = _definition(value, definitions)
        lines += ["", f"## {section}", "", comments.get(("", section)) or definition["description"]]
        if value.get("type") == "array":
            lines += ["", *_table(definition, section, comments, definitions, prefix=f"{section}[].")]
            if section == "workers":
                streams = definitions["StreamSettings"]
                lines += _table(streams, section, comments, definitions, prefix="workers[].streams[].")[2:]
        elif section in ("models", "service_levels"):
            lines += ["", *_table(definition, section, comments, definitions, prefix=f"{section}.<name>.")]
        else:
            lines += ["", *_table(definition, section, comments, definitions, prefix=f"{section}.")]
        if section == "tenants":
            tenant = definitions["TenantSettings"]
            lines += _table(tenant, section, comments, definitions, prefix="tenants.named.<name>.")[2:]
    return "\n".join(lines) + "\n"


def _table(
    definition: Schema, section: str, comments: dict[tuple[str, str], str], definitions: Schema, prefix: str
) -> list[str]:
    rows = ["| setting | type | default | |", "|---|---|---|---|"]
    for name, value in definition["properties"].items():
        if name == _TENANT and section == "tenants":
            continue
        required = name in definition.get("required", [])
        default = "required" if required else f"`{json.dumps(value.get('default'), ensure_ascii=False)}`"
        if isinstance(value.get("default"), list):
            default = ", ".join(f"`{each}`" for each in value["default"])
        about = comments.get((section, name), "")
        rows.append(f"| `{prefix}{name}` | {_cell(_kind(value, definitions))} | {default} | {_cell(about)} |")
    return rows


def _comments(text: str) -> dict[tuple[str, str], str]:
    """Return the comments of config.yaml by (section, key). The comment above a section has the key ("", section)."""
    comments: dict[tuple[str, str], str] = {}
    section = ""
    above: list[str] = []
    examples: dict[str, str] = {}
    for line in text.splitlines():
        if example := _EXAMPLE.match(line):
            if example["comment"] and section == "tenants":  # the example of a tenant is in its section,
                comments[section, example["key"]] = example["comment"]
            elif example["comment"]:  # that of a worker above its own
                examples[example["key"]] = example["comment"]
        elif found := _SETTING.match(line):
            if found["comment"]:
                comments[section, found["key"]] = found["comment"]
        elif top := _SECTION.match(line):
            section = top["key"]
            comments |= {(section, key): comment for key, comment in examples.items()}
            if above:
                comments["", section] = " ".join(above)
            examples, above = {}, []
        elif re.match(r"# \S", line):
            above.append(line[2:].strip())
        elif not line.startswith("#"):
            above = []
    return comments


# Commands


def cli_page() -> str:
    """Return the page of subcommands with their arguments and options."""
    lines = _head("Commands", "`kvrouter COMMAND --help` says the same, for the version that is installed.")
    for name, callback in registered_commands():
        parameters = list(_parameters(callback))
        arguments = "".join(f" {title}" for title, option, *_ in parameters if not option)
        lines += ["", f"## kvrouter {name}", "", *_paragraphs(callback), "", "```text"]
        options = " [OPTIONS]" if any(option for _, option, *_ in parameters) else ""
        lines += [f"kvrouter {name}{options}{arguments}", "```"]
        if parameters:
            lines += ["", "| | type | default | |", "|---|---|---|---|"]
            for title, _, kind, default, about in parameters:
                lines.append(f"| `{title}` | {_cell(kind)} | {_cell(default)} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def registered_commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return every subcommand, also of groups, by the words after `kvrouter`."""
    groups = [("", commands), *((f"{group.name} ", group.typer_instance) for group in commands.registered_groups)]
    for above, group in groups:
        for command in group.registered_commands if group else ():
            assert command.callback is not None
            yield above + (command.name or command.callback.__name__.replace("_", "-")), command.callback


def _paragraphs(callback: Callable[..., Any]) -> list[str]:
    return (inspect.getdoc(callback) or "").splitlines()


def _parameters(callback: Callable[..., Any]) -> Iterator[tuple[str, bool, str, str, str]]:
    """Yield the title, whether it is an option, type, default and help of each parameter."""
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        if hints[name] is Context:
            continue
        kind, *annotations = get_args(hints[name])
        info = next(each for each in annotations if isinstance(each, OptionInfo | ArgumentInfo))
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            title = info.metavar or name.upper()
        else:
            # In an annotation Typer takes the first of the given flags for the default.
            given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
            flag = name.replace("_", "-")
            flags = given or [f"--{flag}", *([f"--no-{flag}"] if _plain(kind) is bool else [])]
            title = ", ".join(flags)
        default = "required" if required else _shown_default(parameter.default, info)
        about = info.help or ""
        if info.envvar:
            variables = [info.envvar] if isinstance(info.envvar, str) else info.envvar
            about += f" Also from the environment: {', '.join(f'`{each}`' for each in variables)}."
        yield title, isinstance(info, OptionInfo), _python_kind(kind), default, about


def _shown_default(value: Any, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    return "" if value in (None, "", False) else f"`{json.dumps(value, default=str)}`"


def _plain(kind: Any) -> Any:
    """Return a type without its None."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)
    return kind


def _python_kind(kind: Any) -> str:
    kind = _plain(kind)
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is list:
        return f"{_python_kind(get_args(kind)[0])}, repeatable"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(kind)
    return {str: "text", int: "integer", float: "number", bool: "flag", Path: "path"}.get(kind, str(kind))


# The HTTP API


def api_page(document: Schema) -> str:
    """Return the page of the router's own endpoints, from its OpenAPI document."""
    lines = _head(
        "HTTP endpoints",
        "Those of the router itself, made from the document that it serves at `/openapi.json`. All other paths are the "
        "workers': [api.md](../api.md) describes their routing. `/match`, `/register`, `/unregister`, `/query`, "
        "`/query_by_hash`, `/dump`, `/workers`, `/health` and `/metrics` are those of `kvrouter indexer` too.",
    )
    schemas = document.get("components", {}).get("schemas", {})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += ["", f"## {method.upper()} {path}", ""]
            lines += [" ".join(operation["description"].split("\n\n")[0].split())]
            rows = [
                (each["name"], each["in"], _kind(each["schema"], schemas), each["required"], "")
                for each in operation.get("parameters", [])
            ]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            rows += list(_fields(body, ""))
            if rows:
                lines += ["", "| field | in | type | default |", "|---|---|---|---|"]
                for name, place, kind, required, default in rows:
                    lines.append(f"| `{name}` | {place} | {_cell(kind)} | {'required' if required else default} |")
            answers = [
                f"{status} {answer['description']}"
                for status, answer in operation["responses"].items()
                if status != "422"
            ]
            lines += [
                "",
                "Answers: "
                + "; ".join(answer.rstrip(".").replace("Successful Response", "done") for answer in answers)
                + ".",
            ]
    return "\n".join(lines) + "\n"


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, str, str, bool, str]]:
    for name, value in schema.get("properties", {}).items():
        default = f"`{json.dumps(value['default'], ensure_ascii=False)}`" if value.get("default") is not None else ""
        yield f"{prefix}{name}", "body", _kind(value, {}), name in schema.get("required", []), default
        for each in [value, *value.get("anyOf", [])]:
            if "properties" in each.get("items", {}):
                yield from _fields(each["items"], f"{prefix}{name}[].")


async def openapi() -> Schema:
    """Return the OpenAPI document of a router without workers."""
    async with running_router(Settings()) as app:
        return app.openapi()


# Alerts


def alerts_page() -> str:
    """Return the page of the chart's alert rules."""
    lines = _head(
        "Alerts",
        "The rules of [alerts.yaml](../../deploy/helm/kvrouter/files/alerts.yaml), which the chart installs with "
        "`monitoring.prometheusRule.enabled`. [metrics.md](../metrics.md) describes the metrics.",
    )
    lines += ["", "| alert | severity | after | what it says | what to do |", "|---|---|---|---|---|"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            cells = [
                re.sub(r"{{ \$labels\.(\w+) }}", r"(\1)", rule["annotations"][key])
                for key in ("summary", "description")
            ]
            severity = rule["labels"]["severity"]
            row = [f"`{rule['alert']}`", severity, rule.get("for", "at once"), *cells]
            lines.append("| " + " | ".join(map(_cell, row)) + " |")
    return "\n".join(lines) + "\n"


# Words for schemas


# Findings


def findings_page() -> str:
    """Return the page of findings, from router/observability/advice.py."""
    lines = _head(
        "Findings",
        "The findings of `/health`, of the page and of `kvrouter doctor`. `error`: a worker or the router does not "
        "serve. `warning`: hits are lost, or requests are late. `info`: nothing needs to be done.",
    )
    for name, (severity, meaning, action) in sorted(ADVICE.items()):
        lines += ["", f"## {name}", "", f"`{severity}`: {meaning}.", "", action]
    return "\n".join(lines) + "\n"


def _definition(value: Schema, definitions: Schema) -> Schema:
    """Return the definition of a section of the settings."""
    text = json.dumps(value)
    found = re.search(r'"#/\$defs/(\w+)"', text)
    assert found is not None, text
    definition: Schema = definitions[found[1]]
    return definition


def _kind(value: Schema, definitions: Schema) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in value:
        return _kind(definitions[value["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in value:
        kinds = [_kind(each, definitions) for each in value["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items', {}), definitions)}"
    bounds = [
        words.format(value[key])
        for key, words in (
            ("minimum", "≥ {}"),
            ("exclusiveMinimum", "> {}"),
            ("maximum", "≤ {}"),
            ("exclusiveMaximum", "< {}"),
        )
        if key in value
    ]
    kind = {"uri": "URL", "path": "path", "file-path": "path"}.get(value.get("format", ""), value.get("type", "any"))
    return " ".join([kind, ", ".join(bounds)]).strip()


def _head(title: str, about: str) -> list[str]:
    return [f"# {title}", "", about]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "alerts.md": alerts_page(),
        "api.md": api_page(asyncio.run(openapi())),
        "cli.md": cli_page(),
        "config.md": config_page(),
        "findings.md": findings_page(),
    }


def main() -> None:
    """Write the pages."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    main()
