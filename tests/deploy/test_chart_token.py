"""The operator's token that the chart makes: random, in a Secret, and the same after an upgrade."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="make test-helm installs it", exc_type=ImportError)

from chart import CHART, Object, container, named, of_kind, render  # noqa: E402

pytestmark = pytest.mark.helm

SECRET = "rel-kvrouter-token"


@contextmanager
def cluster(secrets: dict[str, Object]) -> Iterator[Any]:
    """Serve the Secrets of the namespace `inference` like the API of a cluster."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/v1":
                kind = {"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get", "list"]}
                self.answer(200, {"kind": "APIResourceList", "groupVersion": "v1", "resources": [kind]})
            elif found := secrets.get(path.removeprefix("/api/v1/namespaces/inference/secrets/")):
                self.answer(200, found)
            else:
                missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
                self.answer(404, missing)

        def answer(self, status: int, body: Object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with helm_python.Config(kubeconfig_content="{}", kube_apiserver=url, namespace="inference") as config:
            yield config
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def upgraded(config: Any, values: Object) -> list[Object]:
    """The objects of an upgrade in that cluster."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = config.render(chart, values, name="rel", namespace="inference", is_upgrade=True)
    texts = (text for path, text in rendered.items() if not path.endswith(".txt"))
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def token_in(objects: list[Object], key: str = "token") -> bytes:
    return base64.b64decode(named(objects, "Secret", SECRET)["data"][key])


def test_chart_creates_a_random_token_for_the_router() -> None:
    first, second = render({}), render({})
    assert len(token_in(first)) == 48
    assert token_in(first) != token_in(second)
    env = {variable["name"]: variable for variable in container(first, "rel-kvrouter-router")["env"]}
    reference = env["KVROUTER_SERVER__TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": SECRET, "key": "token"}


@pytest.mark.parametrize("key", ["token", "admin.token"])
def test_upgrade_keeps_the_token(key: str) -> None:
    values = {"secrets": {"adminToken": {"key": key}}}
    with cluster({}) as config:
        installed = upgraded(config, values)
    with cluster({SECRET: named(installed, "Secret", SECRET)}) as config:
        assert token_in(upgraded(config, values), key) == token_in(installed, key)


@pytest.mark.parametrize("token", [{"name": "mine"}, {"create": False}])
def test_token_is_not_created_when_named_or_disabled(token: Object) -> None:
    objects = render({"secrets": {"adminToken": token}})
    assert of_kind(objects, "Secret") == []
    env = {variable["name"] for variable in container(objects, "rel-kvrouter-router")["env"]}
    assert ("KVROUTER_SERVER__TOKEN" in env) == ("name" in token)
