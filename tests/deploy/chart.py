"""The chart as the official Helm library renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvrouter"
PROFILES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))

Object = dict[str, Any]


def profile(name: str) -> Object:
    """The values of a profile."""
    return yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text()) or {}


def render(values: Object, name: str = "rel", namespace: str = "inference") -> list[Object]:
    """The objects that a release has. Raises helm_python's errors."""
    objects = []
    with helm_python.Chart.load(CHART) as chart:
        for path, text in chart.render(values, name=name, namespace=namespace).items():
            if not path.endswith(".txt"):
                objects += [found for found in yaml.safe_load_all(text) if found]
    return objects


def notes(values: Object) -> str:
    """Return the notes that are shown after the installation."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="rel", namespace="inference")
    return next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(found for found in of_kind(objects, kind) if found["metadata"]["name"] == name)


def pod_templates(objects: list[Object]) -> list[Object]:
    """Metadata and spec of every pod that the objects make."""
    templates = [
        found["spec"]["template"] for kind in ("Deployment", "StatefulSet") for found in of_kind(objects, kind)
    ]
    return templates + group_templates(objects) + of_kind(objects, "Pod")


def group_templates(objects: list[Object]) -> list[Object]:
    """Return metadata and spec of every pod of a LeaderWorkerSet."""
    groups = [found["spec"]["leaderWorkerTemplate"] for found in of_kind(objects, "LeaderWorkerSet")]
    return [group[part] for group in groups for part in ("leaderTemplate", "workerTemplate") if part in group]


def containers(objects: list[Object]) -> list[Object]:
    return [container for pod in pod_templates(objects) for container in pod["spec"]["containers"]]


def container(objects: list[Object], deployment: str) -> Object:
    return named(objects, "Deployment", deployment)["spec"]["template"]["spec"]["containers"][0]
