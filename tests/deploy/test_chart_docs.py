"""Generated files of the chart are current, and dashboards and alerts query existing metrics."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from kvrouter.processes import KvrouterProcess

HELM = Path(__file__).parents[2] / "deploy" / "helm"
CHART = HELM / "kvrouter"
DOCS = HELM.parents[1] / "docs"

# Strings are removed from a query before its metrics are read.
_STRINGS = re.compile(r'"[^"]*"')
_METRIC = re.compile(r"\b(?:kvrouter_|vllm:)\w+")


def script(name: str) -> ModuleType:
    """A script beside the chart."""
    spec = importlib.util.spec_from_file_location(name, HELM / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


chart_docs = script("chart_docs")
dashboards = script("dashboards")


def test_schema_and_readme_of_values_are_current() -> None:
    values = chart_docs.read_values(CHART / "values.yaml")
    hint = "run `make chart-docs`"
    assert chart_docs.values_schema(values) == (CHART / "values.schema.json").read_text(), hint
    assert chart_docs.readme(values) == (CHART / "README.md").read_text(), hint


def test_dashboards_are_current() -> None:
    assert {path.stem for path in (CHART / "dashboards").iterdir()} == set(dashboards.DASHBOARDS)
    for name in dashboards.DASHBOARDS:
        assert dashboards.dashboard(name) == (CHART / "dashboards" / f"{name}.json").read_text(), (
            "run `make chart-docs`"
        )


def test_dashboards_are_those_of_the_documentation() -> None:
    text = " ".join((DOCS / "kubernetes.md").read_text().split())
    promised = re.search(r"(\w+) Grafana dashboards: ([^.]*)\.", text)
    assert promised is not None
    names = re.split(", | and ", promised[2])
    assert {"two": 2, "three": 3, "four": 4}[promised[1]] == len(names)
    titles = {json.loads(path.read_text())["title"] for path in (CHART / "dashboards").iterdir()}
    assert {title.removeprefix("kvrouter: ").split()[0] for title in titles} == set(names)


def test_profiles_are_those_of_the_documentation() -> None:
    documented = re.findall(r"^\| `([\w-]+-values\.yaml)` \|", (DOCS / "kubernetes.md").read_text(), re.MULTILINE)
    shipped = {path.name for path in (CHART / "ci").iterdir()} - {"default-values.yaml"}
    assert set(documented) == shipped


def test_values_for_secrets_are_those_of_the_documentation() -> None:
    table = re.search(r"^\| value \| keys \|.*?\n\n", (DOCS / "kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    documented = set(re.findall(r"^\| `([\w.<>]+)` \|", table[0], re.MULTILINE))
    schema = json.loads((CHART / "values.schema.json").read_text())
    of_secrets = {f"secrets.{name}" for name in schema["properties"]["secrets"]["properties"]}
    assert {name for name in documented if name.startswith("secrets.")} == of_secrets
    assert "existingSecret" in schema["properties"]["redis"]["properties"]
    assert "redis.existingSecret" in documented


def properties(schema: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every property in a schema, with its place."""
    if isinstance(schema, list):
        for each in schema:
            yield from properties(each, place)
    elif isinstance(schema, dict):
        for name, each in schema.get("properties", {}).items():
            yield f"{place}.{name}", each
        for key, each in schema.items():
            yield from properties(each, f"{place}.{key}")


def test_every_value_has_a_description() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = dict(properties(schema))
    assert len(found) > 300
    assert [place for place, each in found.items() if not each.get("description")] == []


def test_schema_allows_no_additional_properties() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for place, each in [("", schema), *properties(schema)]:
        if "properties" in each and not place.lower().endswith(("securitycontext", "seccompprofile", "capabilities")):
            assert each["additionalProperties"] is False, place


def test_value_without_a_comment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# The first.\nfirst: 1\nsecond: 2\n")
    with pytest.raises(ValueError, match="second: every value needs a comment"):
        chart_docs.read_values(tmp_path / "values.yaml")


def test_null_default_without_a_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# The first.\nfirst: null\n")
    [value] = chart_docs.read_values(tmp_path / "values.yaml")
    with pytest.raises(ValueError, match="first: a default of null"):
        value.schema()


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of all series of a router, which has its index inside, and of a worker that has vLLM's."""
    text = ""
    for options in (["serve", "--port", "0", "--worker", "http://127.0.0.1:9"], ["simulate", "--port", "0"]):
        with KvrouterProcess(options) as server:
            text += urlopen(f"{server.wait_until_listening()}/metrics", timeout=60).read().decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE ([\w:]+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def queried_metrics(queries: list[str]) -> set[str]:
    return {name for query in queries for name in _METRIC.findall(_STRINGS.sub("", query))}


def test_alerts_query_existing_metrics(exported: set[str]) -> None:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    queries = [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(queries) >= 10
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert all(queried_metrics([query]) for query in queries)
    assert queried_metrics(queries) <= exported


@pytest.mark.parametrize("name", sorted(dashboards.DASHBOARDS))
def test_dashboards_query_existing_metrics(name: str, exported: set[str]) -> None:
    document = json.loads(dashboards.dashboard(name))
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert all(panel["description"] for panel in panels)
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = [variable["query"] for variable in document["templating"]["list"] if variable["type"] == "query"]
    assert all(queried_metrics([query]) for query in queries if "sglang:" not in query)
    assert queried_metrics([*queries, *variables]) <= exported
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
    assert len(set(places)) == len(places)
