"""The chart: rendered objects are valid, safe and consistent, and unusable values are refused with a reason."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="make test-helm installs it", exc_type=ImportError)
jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

from chart import (  # noqa: E402
    CHART,
    PROFILES,
    Object,
    container,
    containers,
    group_templates,
    named,
    notes,
    of_kind,
    pod_templates,
    profile,
    render,
)
from crd_schemas import SCHEMAS  # noqa: E402

from router.settings import load_settings  # noqa: E402

pytestmark = pytest.mark.helm

RANKS = 4
VLLM = {"model": "m", "dataParallelSize": RANKS}

# Values that the profiles leave alone: each must render to valid objects too.
VARIANTS: dict[str, Object] = {
    "names": {"nameOverride": "other", "fullnameOverride": "a-name-that-is-much-longer-than-kubernetes-lets-names-be"},
    "an account of one's own": {"serviceAccount": {"create": False, "name": "mine"}, "rbac": {"create": False}},
    "no discovery": {"discovery": {"mode": "none"}, "config": {"workers": [{"url": "http://gpu-1:8000"}]}},
    "a service that exists": {"discovery": {"mode": "service", "service": "vllm", "namespace": "models"}},
    "a port for operators": {
        "config": {"server": {"admin_port": 9090}},
        "indexer": {"mode": "sidecar"},
        "picker": {"enabled": True},
        "envoy": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "no token": {"secrets": {"adminToken": {"create": False}}},
    "one replica": {"router": {"replicas": 1}, "redis": {"enabled": True}},
    "no policies": {"networkPolicy": {"enabled": False}, "workers": {"a": VLLM}, "tests": {"enabled": False}},
    "every placement": {
        "workers": {"a": VLLM | {"pod": {"runtimeClassName": "nvidia", "schedulerName": "volcano"}}},
        "podDefaults": {
            "annotations": {"a": "b"},
            "labels": {"c": "d"},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "priorityClassName": "high",
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraEnvFrom": [{"secretRef": {"name": "s"}}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        },
        "redis": {"enabled": True},
        "envoy": {"enabled": True},
        "picker": {"enabled": True},
        "indexer": {"mode": "standalone"},
    },
    "worker odds": {
        "workers": {
            "a": {
                "engine": "sglang",
                "model": "m",
                "gpus": 0,
                "maxModelLen": 1_000_000,
                "gpuMemoryUtilization": 0.85,
                "replicas": 0,
                "modelCache": {"sizeLimit": "100Gi"},
                "extraArgs": ["--trust-remote-code"],
            },
            "b": {"engine": "simulated", "maxUnavailable": None, "replicas": 2, "blockSize": 32},
            "c": {},
        },
        "workerDefaults": {"engine": "simulated"},
    },
    "from none": {
        "workers": {
            "a": VLLM | {"keda": {"enabled": True, "serverAddress": "http://prometheus:9090"}},
            "b": {"engine": "sglang", "model": "n", "modelCache": {"enabled": True}},
        },
        "workerDefaults": {"lora": {"enabled": True, "adapters": {"poet": "/adapters/poet"}}},
    },
    "events elsewhere": {"events": {"port": 6000, "replayPort": 5000, "topic": ""}, "workers": {"a": VLLM}},
    "node port": {"envoy": {"enabled": True, "service": {"type": "NodePort", "nodePort": 30080}}},
    "no routes' host": {"ingress": {"enabled": True}, "secrets": {"tls": "tls"}, "envoy": {"enabled": True}},
    "OpenShift": {"podDefaults": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}},
}

# Valid releases: each rule below holds for all of them.
RELEASES = {name: profile(name) for name in PROFILES} | VARIANTS


@cache
def release(name: str) -> list[Object]:
    return render(RELEASES[name])


@pytest.fixture(params=RELEASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return release(request.param)


# What the cluster would say


@pytest.mark.parametrize("values", RELEASES.values(), ids=RELEASES.keys())
def test_helm_lint_passes(values: Object) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [found["error"] for found in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", ["1.28", "1.32", kubernetes_validate.latest_version()])
def test_every_object_is_valid(objects: list[Object], version: str) -> None:
    for found in objects:
        if found["kind"] in SCHEMAS:
            jsonschema.validate(found, SCHEMAS[found["kind"]])
        else:
            kubernetes_validate.validate(found, version, strict=True)
    for template in group_templates(objects):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, version, strict=True)


def test_object_names_are_unique_and_valid(objects: list[Object]) -> None:
    names = [(found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)
    for _kind, _namespace, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


# What is safe


def test_no_pod_runs_as_root(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context.get("runAsUser", 1) != 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["spec"].get("hostNetwork")
    for each in containers(objects):
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not context.get("privileged")


def test_every_container_has_limits_and_probes(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        for each in pod["spec"]["containers"]:
            assert each["resources"]["requests"]["cpu"]
            assert each["resources"]["requests"]["memory"]
            assert each["resources"]["limits"]["memory"]
            by_itself = pod.get("kind") == "Pod"  # a test
            if not by_itself and pod["metadata"]["labels"]["app.kubernetes.io/component"] != "worker-node":
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= each.keys()


def test_images_are_pinned(objects: list[Object]) -> None:
    for each in containers(objects):
        assert re.fullmatch(r".+(:v?\d[\w.-]*|@sha256:[0-9a-f]{64})", each["image"])


def test_role_allows_only_listing_and_watching_workers(objects: list[Object]) -> None:
    assert not of_kind(objects, "ClusterRole") + of_kind(objects, "ClusterRoleBinding")
    for role in of_kind(objects, "Role"):
        [rule] = role["rules"]
        assert rule["verbs"] == ["list", "watch"]
        assert (rule["apiGroups"], rule["resources"]) in (
            ([""], ["pods"]),
            (["discovery.k8s.io"], ["endpointslices"]),
        )


def test_only_discovering_components_mount_a_service_account_token(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if pod["spec"]["automountServiceAccountToken"]:
            assert component in ("router", "envoy", "picker")
        else:
            assert component in ("worker", "redis", "indexer", "test") or not of_kind(objects, "Role")


def test_secrets_are_never_rendered_in_plain(objects: list[Object]) -> None:
    for secret in of_kind(objects, "Secret"):  # the operator's token, which is made there
        assert len(base64.b64decode(secret["data"]["token"])) == 48
    for settings in rendered_settings(objects):
        assert settings.server.token == settings.index.secret == ""
        assert not settings.tenants.named
    for each in containers(objects):
        for variable in each.get("env", []):
            if re.search("TOKEN|SECRET|API_KEY|NAMED", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]


# What fits together


def matches(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


def test_selectors_match_only_their_own_pods(objects: list[Object]) -> None:
    workloads = of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet")
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        found = [w for w in workloads if matches(selector, w["spec"]["template"]["metadata"]["labels"])]
        assert found == [workload]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert any(
            matches(budget["spec"]["selector"]["matchLabels"], p["metadata"]["labels"]) for p in pod_templates(objects)
        )
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        scaled = named(objects, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in scaled["spec"]  # or else each upgrade would undo the scaling


def test_services_target_existing_ports(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        pods = [p for p in pod_templates(objects) if matches(service["spec"]["selector"], p["metadata"]["labels"])]
        assert pods
        for pod in pods:
            ports = {port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_probes_use_existing_ports(objects: list[Object]) -> None:
    for each in containers(objects):
        ports = {port["name"]: port["containerPort"] for port in each.get("ports", [])}
        assert len(set(ports.values())) == len(ports)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = each.get(kind, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
            if "grpc" in probe:
                assert probe["grpc"]["port"] in ports.values()


def test_ports_of_a_pod_are_unique(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        ports = [port["containerPort"] for each in pod["spec"]["containers"] for port in each.get("ports", [])]
        assert len(set(ports)) == len(ports)


def test_volume_mounts_have_volumes(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        assert len(set(volumes)) == len(volumes)
        for each in pod["spec"]["containers"]:
            assert {mount["name"] for mount in each.get("volumeMounts", [])} <= set(volumes)
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume:
                assert named(objects, "ConfigMap", volume["configMap"]["name"])


def test_service_monitors_scrape_service_ports(objects: list[Object]) -> None:
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in of_kind(objects, "Service") if matches(selector, s["metadata"]["labels"])]
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_routes_target_existing_services_and_pools(objects: list[Object]) -> None:
    for route in of_kind(objects, "HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            target = named(objects, backend.get("kind", "Service"), backend["name"])
            if "port" in backend:
                assert backend["port"] in [port["port"] for port in target["spec"]["ports"]]
    for ingress in of_kind(objects, "Ingress"):
        backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in [
            p["name"] for p in named(objects, "Service", backend["name"])["spec"]["ports"]
        ]
    for pool in of_kind(objects, "InferencePool"):
        reference = pool["spec"]["endpointPickerRef"]
        ports = named(objects, "Service", reference["name"])["spec"]["ports"]
        assert reference["port"]["number"] in [port["port"] for port in ports]


def test_grace_period_exceeds_the_pre_stop_delay(objects: list[Object]) -> None:
    for pod in pod_templates(objects):
        for each in pod["spec"]["containers"]:
            command = each.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["0"])
            seconds = int(re.findall(r"\d+", command[-1])[-1])
            assert pod["spec"].get("terminationGracePeriodSeconds", 30) > seconds


def rendered_settings(objects: list[Object]) -> list[Any]:
    texts = [m["data"]["config.yaml"] for m in of_kind(objects, "ConfigMap") if "config.yaml" in m.get("data", {})]
    return [settings_of(yaml.safe_load(text)) for text in texts]


def settings_of(fields: Object) -> Any:
    # Files that are mounted in the pod: whether they can be read is the router's to find out.
    fields.get("events", {}).pop("curve_secret_key_file", None)
    return load_settings(None, fields)


def test_router_accepts_the_rendered_settings(objects: list[Object]) -> None:
    [settings] = rendered_settings(objects)
    assert settings.server.host == "0.0.0.0"


def test_envoy_listeners_use_the_configured_clusters(objects: list[Object]) -> None:
    for found in of_kind(objects, "ConfigMap"):
        if "envoy.yaml" in found.get("data", {}):
            config = yaml.safe_load(found["data"]["envoy.yaml"])["static_resources"]
            clusters = {cluster["name"] for cluster in config["clusters"]}
            used = re.findall(r"'cluster(?:_name)?': '(\w+)'", str(config["listeners"]))
            assert set(used) == clusters
            assert len(config["listeners"]) == 2


# The parts


def test_new_replica_loads_the_index_of_a_peer() -> None:
    env = {v["name"]: v.get("value") for v in container(release("default"), "rel-kvrouter-router")["env"]}
    assert env["KVROUTER_INDEX__PEER"] == "http://rel-kvrouter-router.inference.svc:80"
    assert env["KVROUTER_INDEX__SNAPSHOT"].startswith("/var/lib/kvrouter/")


def test_config_values_override_chart_defaults() -> None:
    mine = {"index": {"peer": "http://other:80", "snapshot": "/var/lib/kvrouter/mine"}, "kubernetes": {"port": 9000}}
    objects = render({"config": mine})
    names = {variable["name"] for variable in container(objects, "rel-kvrouter-router")["env"]}
    assert not names & {"KVROUTER_INDEX__PEER", "KVROUTER_INDEX__SNAPSHOT"}
    [settings] = rendered_settings(objects)
    assert settings.index.peer is not None
    assert settings.index.peer.host == "other"
    assert settings.kubernetes.port == 9000
    assert settings.kubernetes.selector


def test_chart_accepts_every_setting() -> None:
    text = (Path(CHART).parents[2] / "config.yaml").read_text()
    config = yaml.safe_load(text)
    del config["server"]["token"], config["index"]["secret"], config["tenants"]["named"]
    del config["replicas"]["redis"], config["fleet"]["api_key"]
    [settings] = rendered_settings(render({"config": config}))
    assert settings.policy == load_settings(None).policy


def test_secrets_are_referenced_by_name() -> None:
    env = {v["name"]: v for v in container(release("secure"), "rel-kvrouter-router")["env"]}
    for name, key in (
        ("KVROUTER_SERVER__TOKEN", "token"),
        ("KVROUTER_INDEX__SECRET", "secret"),
        ("KVROUTER_TENANTS__NAMED", "tenants.json"),
    ):
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "kvrouter", "key": key}


@pytest.mark.parametrize(
    ("engine", "variable", "argument"),
    [("vllm", "VLLM_API_KEY", None), ("sglang", "WORKER_API_KEY", True), ("simulated", "WORKER_API_KEY", True)],
)
def test_engine_and_router_share_the_worker_api_key(engine: str, variable: str, argument: bool | None) -> None:
    objects = render(
        {"secrets": {"workerApiKey": {"name": "a-secret"}}, "workers": {"a": {"engine": engine, "model": "m"}}}
    )
    worker = container(objects, "rel-kvrouter-worker-a")
    for each, name in ((worker, variable), (container(objects, "rel-kvrouter-router"), "KVROUTER_FLEET__API_KEY")):
        env = {known["name"]: known for known in each["env"]}
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "a-secret", "key": "api-key"}
    words = worker.get("command", []) + worker.get("args", [])
    assert ("--api-key=$(WORKER_API_KEY)" in words) is bool(argument)


def test_admin_port_has_its_own_service() -> None:
    objects = release("a port for operators")
    router = container(objects, "rel-kvrouter-router")
    assert {port["name"]: port["containerPort"] for port in router["ports"]} == {"http": 8080, "admin": 9090}
    clients, operators = (
        named(objects, "Service", name) for name in ("rel-kvrouter-router", "rel-kvrouter-router-admin")
    )
    assert [port["targetPort"] for port in clients["spec"]["ports"]] == ["http"]
    assert [port["targetPort"] for port in operators["spec"]["ports"]] == ["admin"]
    monitor = named(objects, "ServiceMonitor", "rel-kvrouter-router")
    assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == ["admin"]
    env = {variable["name"]: variable.get("value") for variable in router["env"]}
    assert env["KVROUTER_INDEX__PEER"] == "http://rel-kvrouter-router-admin.inference.svc:9090"


def test_tenants_are_read_from_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_TENANTS__NAMED", json.dumps({"team-a": {"keys": ["a" * 64], "models": ["m"]}}))
    monkeypatch.setenv("KVROUTER_SERVER__TOKEN", "t")
    assert load_settings(None).tenants.named["team-a"].models == ["m"]


def test_replicas_share_one_redis() -> None:
    own = {v["name"]: v.get("value") for v in container(release("vllm"), "rel-kvrouter-router")["env"]}
    assert "HF_TOKEN" in own
    assert load_settings(None, {"replicas": {"redis": own["KVROUTER_REPLICAS__REDIS"]}})
    [settings] = rendered_settings(release("vllm"))
    assert settings.replicas.prefix == "inference/rel-kvrouter"
    assert own["KVROUTER_REPLICAS__REDIS"] == "redis://rel-kvrouter-redis.inference.svc:6379/0"
    picker = container(release("gateway"), "rel-kvrouter-picker")
    [variable] = [v for v in picker["env"] if v["name"] == "KVROUTER_REPLICAS__REDIS"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "shared-redis", "key": "url"}
    assert not of_kind(release("gateway"), "StatefulSet")


def test_picker_service_uses_tls_with_a_certificate() -> None:
    files = {"certificate": "/etc/kvrouter/tls/tls.crt", "key": "/etc/kvrouter/tls/tls.key"}
    for picker, protocol, probe in (({}, "kubernetes.io/h2c", "grpc"), (files, "https", "httpGet")):
        objects = render({"picker": {"enabled": True}, "secrets": {"tls": "a-secret"}, "config": {"picker": picker}})
        [service] = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "rel-kvrouter-picker"]
        ports = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
        assert ports["grpc"] == protocol
        assert probe in container(objects, "rel-kvrouter-picker")["readinessProbe"]


@pytest.mark.parametrize("kind", ["objectives", "rewrites"])
def test_picker_role_allows_objects_that_are_followed(kind: str) -> None:
    resource = {"objectives": "inferenceobjectives", "rewrites": "inferencemodelrewrites"}[kind]
    for group in ("inference.networking.x-k8s.io", "llm-d.ai"):
        objects = render({"picker": {"enabled": True}, "config": {"picker": {f"follow_{kind}": group}}})
        [role] = of_kind(objects, "Role")
        rule = {"apiGroups": [group], "resources": [resource], "verbs": ["list", "watch"]}
        assert rule in role["rules"]


def test_probes_and_monitors_use_https_with_tls() -> None:
    objects = release("secure")
    router = container(objects, "rel-kvrouter-router")
    assert router["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    monitors = {m["metadata"]["name"]: m for m in of_kind(objects, "ServiceMonitor")}
    assert monitors["rel-kvrouter-router"]["spec"]["endpoints"][0]["scheme"] == "https"
    [settings] = rendered_settings(objects)
    assert str(settings.server.certificate) == "/etc/kvrouter/tls/tls.crt"


def test_router_grace_period_covers_the_drain() -> None:
    pod = named(release("secure"), "Deployment", "rel-kvrouter-router")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 5 + 10 + 120 + 10


def test_changed_settings_restart_the_router() -> None:
    def checksum(values: Object) -> str:
        template = named(render(values), "Deployment", "rel-kvrouter-router")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"router": {"replicas": 5}}) != checksum({"config": {"logs": {"access": True}}})


def test_role_is_created_in_the_namespace_of_the_workers() -> None:
    [role], [binding] = of_kind(release("secure"), "Role"), of_kind(release("secure"), "RoleBinding")
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "models"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == "inference"


# Workers


def option(command: list[str], name: str) -> str:
    return next(word.removeprefix(f"{name}=") for word in command if word.startswith(f"{name}="))


def labels_selected(selector: str) -> Object:
    return dict(pair.split("=", 1) for pair in selector.split(","))


def test_pod_selector_matches_the_workers_of_the_release() -> None:
    for name in ("demo", "vllm", "disaggregated"):
        [settings] = rendered_settings(release(name))
        workers = [p for p in pod_templates(release(name)) if "kvrouter.io/worker" in p["metadata"]["labels"]]
        assert workers
        for pod in pod_templates(release(name)):
            found = matches(labels_selected(settings.kubernetes.selector), pod["metadata"]["labels"])
            assert found == (pod in workers)
        for pod in workers:
            ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
            assert ports["http"] == settings.kubernetes.port


def test_discovery_service_publishes_unready_workers() -> None:
    [settings] = rendered_settings(release("sglang"))
    service = named(release("sglang"), "Service", settings.kubernetes.service)
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [port["port"] for port in service["spec"]["ports"]] == [settings.kubernetes.port]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "simulated"])
def test_every_rank_has_event_and_replay_ports(engine: str) -> None:
    objects = render({"workers": {"w": {"engine": engine, "model": "m", "dataParallelSize": RANKS}}})
    worker = container(objects, "rel-kvrouter-worker-w")
    words = worker.get("command", []) + worker.get("args", [])
    config = json.loads(option(words, "--kv-events" if engine == "simulated" else "--kv-events-config"))
    assert config["publisher"] == "zmq"
    assert config.get("enable_kv_cache_events") is (True if engine == "vllm" else None)
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    for kind, key in (("events", "endpoint"), ("replay", "replay_endpoint")):
        base = int(config[key].removeprefix("tcp://*:"))
        assert [ports[f"{kind}-{rank}"] for rank in range(RANKS)] == [base + rank for rank in range(RANKS)]


def test_vllm_command_enables_prefix_routing() -> None:
    worker = container(release("vllm"), "rel-kvrouter-worker-llama")
    words = worker["command"]
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size=16"} <= set(words)
    assert {"--max-model-len=32768", "--gpu-memory-utilization=0.9", "--served-model-name=llama"} <= set(words)
    env = {v["name"]: v for v in worker["env"]}
    assert env["PYTHONHASHSEED"]["value"] == "0"
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hugging-face", "key": "token"}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["requests"]["nvidia.com/gpu"] == 1
    pod = named(release("vllm"), "Deployment", "rel-kvrouter-worker-llama")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["home"]["persistentVolumeClaim"] == {"claimName": "models"}


def test_sglang_command_enables_prefix_routing() -> None:
    words = container(release("sglang"), "rel-kvrouter-worker-qwen")["command"]
    assert words[:3] == ["python3", "-m", "sglang.launch_server"]
    assert {"--enable-cache-report", "--tp-size=8", "--attn-dp-size=8", "--page-size=64"} <= set(words)


@pytest.mark.parametrize(
    ("values", "gpus"),
    [
        ({}, 1),
        ({"tensorParallelSize": 2, "dataParallelSize": 4}, 8),
        ({"engine": "sglang", "tensorParallelSize": 4, "dataParallelSize": 4, "dataParallelAttention": True}, 4),
        ({"gpus": 3}, 3),
        ({"gpus": 0}, None),
    ],
)
def test_gpu_count_follows_parallel_sizes(values: Object, gpus: int | None) -> None:
    worker = container(render({"workers": {"w": {"model": "m"} | values}}), "rel-kvrouter-worker-w")
    assert worker["resources"]["limits"].get("nvidia.com/gpu") == gpus
    assert worker["resources"]["requests"].get("nvidia.com/gpu") == gpus


def test_prefill_and_decode_workers_have_transfer_connectors() -> None:
    objects = release("disaggregated")
    for role in ("prefill", "decode"):
        worker = container(objects, f"rel-kvrouter-worker-{role}")
        assert json.loads(option(worker["command"], "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
        env = {v["name"]: v.get("value") for v in worker["env"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
        assert option(container(objects, f"rel-kvrouter-worker-sg-{role}")["command"], "--disaggregation-mode") == role
        template = named(objects, "Deployment", f"rel-kvrouter-worker-{role}")["spec"]["template"]
        assert template["metadata"]["labels"]["kvrouter.io/role"] == role


def test_encode_workers_hand_media_to_the_others() -> None:
    transfer = {"ec_connector": "ECCPUConnector"}
    workers = {
        "e": {"role": "encode"},
        "w": {"role": "both"},
        "d": {"role": "decode"},
        "sg": {"role": "encode", "engine": "sglang"},
    }
    values = {"workers": {name: VLLM | {"ecTransfer": transfer} | each for name, each in workers.items()}}
    objects = render(values)
    commands = {name: container(objects, f"rel-kvrouter-worker-{name}")["command"] for name in workers}
    for name, role in (("e", "ec_producer"), ("w", "ec_consumer")):
        assert json.loads(option(commands[name], "--ec-transfer-config")) == transfer | {"ec_role": role}
    assert {"--mm-encoder-only", "--no-enable-prefix-caching"} <= set(commands["e"])
    words = " ".join([*commands["e"], *commands["sg"]])
    assert not any(
        option in words for option in ("--kv-transfer-config", "--kv-events-config", "--disaggregation-mode")
    )
    assert "--encoder-only" in commands["sg"]
    assert "--ec-transfer-config" not in " ".join(commands["d"])
    template = named(objects, "Deployment", "rel-kvrouter-worker-e")["spec"]["template"]
    assert template["metadata"]["labels"]["kvrouter.io/role"] == "encode"
    with pytest.raises(helm_python.HelmError, match=r"workers\.e\.ecTransfer: name the connector"):
        render({"workers": {"e": VLLM | {"role": "encode"}, "w": VLLM}})


# Several nodes, offloading, pools


def groups(values: Object) -> tuple[Object, list[Object]]:
    """Return the LeaderWorkerSet of the worker `w`, and its pods."""
    objects = render({"workers": {"w": {"model": "m"} | values}})
    return named(objects, "LeaderWorkerSet", "rel-kvrouter-worker-w"), group_templates(objects)


def component(pod: Object) -> str:
    return pod["metadata"]["labels"]["app.kubernetes.io/component"]


def test_every_node_serves_its_data_parallel_ranks() -> None:
    group, [pod] = groups({"nodes": 2, "dataParallelSize": 16, "replicas": 3, "expertParallel": True})
    assert group["spec"]["replicas"] == 3
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert component(pod) == "worker"  # each node is a worker of the router
    engine = pod["spec"]["containers"][0]
    words = engine["command"]
    assert words[:2] == ["/bin/sh", "-c"]
    assert words[2] == 'exec "$@" --data-parallel-start-rank=$((LWS_WORKER_INDEX * 8))'
    assert words[3:6] == ["sh", "vllm", "serve"]
    assert option(words, "--data-parallel-size") == "16"
    assert option(words, "--data-parallel-size-local") == "8"
    assert option(words, "--data-parallel-address") == "$(LWS_LEADER_ADDRESS)"
    assert {"--data-parallel-hybrid-lb", "--enable-expert-parallel"} <= set(words)
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(("engine", "address"), [("vllm", "--master-addr"), ("sglang", "--dist-init-addr")])
def test_only_the_leader_of_a_tensor_parallel_group_is_a_worker(engine: str, address: str) -> None:
    _, [leader, node] = groups({"engine": engine, "nodes": 2, "tensorParallelSize": 16})
    assert (component(leader), component(node)) == ("worker", "worker-node")
    for pod in (leader, node):
        words = pod["spec"]["containers"][0]["command"]
        assert option(words, "--nnodes") == "2"
        assert option(words, "--node-rank") == "$(LWS_WORKER_INDEX)"
        assert option(words, address).startswith("$(LWS_LEADER_ADDRESS)")
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert ("--headless" in node["spec"]["containers"][0]["command"]) is (engine == "vllm")
    assert "--headless" not in leader["spec"]["containers"][0]["command"]
    assert "ports" not in node["spec"]["containers"][0]


def test_scalers_of_a_group_name_its_kind() -> None:
    scaling = {"enabled": True, "metrics": [{"type": "External", "external": {}}]}
    objects = render({"workers": {"w": {"model": "m", "nodes": 2, "tensorParallelSize": 16, "autoscaling": scaling}}})
    [scaler] = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "rel-kvrouter-worker-w",
    }


def test_nodes_of_a_worker_reach_each_other_but_no_event_streams() -> None:
    objects = release("wide-ep")
    policy = named(objects, "NetworkPolicy", "rel-kvrouter-workers")
    node = {"app.kubernetes.io/name": "kvrouter", "app.kubernetes.io/instance": "rel"}
    for name in ("worker", "worker-node"):
        labels = node | {"app.kubernetes.io/component": name}
        assert allowed(policy, labels, 13345)
        assert not allowed(policy, labels, 5557)


POOL = {"pool": {"address": "master:50051", "http": "http://master:9003", "events": "tcp://master:5557"}}


def connectors(values: Object, **worker: Any) -> list[Object]:
    """Return the KV connectors of a vLLM."""
    objects = render(values | {"workers": {"w": {"model": "m", **worker}}})
    config = json.loads(option(container(objects, "rel-kvrouter-worker-w")["command"], "--kv-transfer-config"))
    return config["kv_connector_extra_config"]["connectors"] if config["kv_connector"] == "MultiConnector" else [config]


def test_offloading_pool_and_transfer_share_an_engine() -> None:
    [tier] = connectors({}, kvOffload={"size": 32})
    assert tier["kv_connector"] == "OffloadingConnector"
    assert tier["kv_connector_extra_config"]["cpu_bytes_to_use"] == 32 * 2**30
    assert tier["kv_connector_extra_config"]["self_describing_kv_events"] is True
    found = connectors(POOL, kvOffload={"size": 1}, role="prefill")
    assert [each["kv_connector"] for each in found] == [
        "NixlConnector", "MooncakeStoreConnector", "OffloadingConnector"
    ]  # fmt: skip


def test_workers_pull_from_the_tiers_of_others_only_if_the_router_pulls() -> None:
    pulling: Object = {"config": {"pulls": {"protocol": "p2p", "port": 6000}}, "networkPolicy": {"enabled": True}}
    workers = {"w": {"model": "m", "kvOffload": {"size": 1}}, "x": {"model": "m"}}
    [tier] = connectors(pulling, kvOffload={"size": 1})
    assert tier["kv_connector_extra_config"]["secondary_tiers"] == [{"type": "p2p"}]
    [tier] = connectors({"config": {"pulls": {"protocol": "sidecar"}}}, kvOffload={"size": 1})
    assert "secondary_tiers" not in tier["kv_connector_extra_config"]
    objects = render(pulling | {"workers": workers})
    env = {each["name"]: each.get("value") for each in container(objects, "rel-kvrouter-worker-w")["env"]}
    assert (env["VLLM_P2P_SIDE_CHANNEL_HOST"], env["VLLM_P2P_SIDE_CHANNEL_PORT"]) == ("$(POD_IP)", "6000")
    other = container(objects, "rel-kvrouter-worker-x")["env"]
    assert "VLLM_P2P_SIDE_CHANNEL_HOST" not in {each["name"] for each in other}
    labels = named(objects, "Deployment", "rel-kvrouter-worker-x")["spec"]["template"]["metadata"]["labels"]
    assert allowed(named(objects, "NetworkPolicy", "rel-kvrouter-workers"), labels, 6000)


def test_router_and_engines_use_the_pool() -> None:
    objects = render(POOL | {"workers": {"w": {"model": "m"}, "s": {"engine": "sglang", "model": "m"}}})
    [settings] = rendered_settings(objects)
    [pool] = settings.pools
    assert (pool.type, str(pool.master), pool.events) == ("mooncake", "http://master:9003/", "tcp://master:5557")
    file = json.loads(named(objects, "ConfigMap", "rel-kvrouter-pool")["data"]["mooncake.json"])
    assert file["master_server_address"] == "master:50051"
    for name in ("w", "s"):
        worker = container(objects, f"rel-kvrouter-worker-{name}")
        env = {each["name"]: each.get("value") for each in worker["env"]}
        path = Path(env["MOONCAKE_CONFIG_PATH"])
        assert str(path.parent) in {mount["mountPath"] for mount in worker["volumeMounts"]}
    assert "--hicache-storage-backend=mooncake" in container(objects, "rel-kvrouter-worker-s")["command"]


def test_a_pool_needs_what_the_router_reads() -> None:
    with pytest.raises(helm_python.HelmError, match=r"pool\.http, pool\.events"):
        render({"pool": {"address": "master:50051"}})


def test_policies_of_ones_own_are_importable_and_restart_the_router() -> None:
    values = {"policies": {"residency.py": "def allowed(c, r): return [0.0] * len(c)\n"}}
    values["config"] = {"policy": {"extra": ["residency:allowed"]}}
    objects = render(values)
    router = container(objects, "rel-kvrouter-router")
    env = {each["name"]: each.get("value") for each in router["env"]}
    mounted = {mount["mountPath"] for mount in router["volumeMounts"]}
    assert env["PYTHONPATH"] in mounted
    assert named(objects, "ConfigMap", "rel-kvrouter-policies")["data"] == values["policies"]
    other = render(values | {"policies": {"residency.py": "def allowed(c, r): return [1.0] * len(c)\n"}})
    first, second = (
        named(each, "Deployment", "rel-kvrouter-router")["spec"]["template"]["metadata"]["annotations"]
        for each in (objects, other)
    )
    assert first["checksum/config"] != second["checksum/config"]


# Network


def allowed(policy: Object, pod_labels: Object, port: int | str) -> bool:
    """Return whether a network policy allows pods with these labels at a port."""
    for rule in policy["spec"]["ingress"]:
        known = any(matches(p["podSelector"]["matchLabels"], pod_labels) for p in rule["from"] if "podSelector" in p)
        for each in rule["ports"]:
            last = each.get("endPort", each["port"])
            if known and (each["port"] == port or (isinstance(port, int) and each["port"] <= port <= last)):
                return True
    return False


@pytest.mark.parametrize("name", ["vllm", "sglang", "disaggregated", "demo", "events elsewhere"])
def test_network_policy_opens_event_ports_to_the_router_only(name: str) -> None:
    objects = release(name)
    policy = named(objects, "NetworkPolicy", "rel-kvrouter-workers")
    pods = {p["metadata"]["labels"]["app.kubernetes.io/component"]: p for p in pod_templates(objects)}
    for pod in pod_templates(objects):
        labels = pod["metadata"]["labels"]
        if "kvrouter.io/worker" not in labels:
            continue
        assert matches(policy["spec"]["podSelector"]["matchLabels"], labels)
        for port in pod["spec"]["containers"][0]["ports"]:
            number = port["containerPort"]
            if port["name"].startswith(("events", "replay")):
                assert allowed(policy, pods["router"]["metadata"]["labels"], number)
                for other in pods.keys() - {"router"}:
                    assert not allowed(policy, pods[other]["metadata"]["labels"], number)
            if port["name"] == "transfer":
                assert allowed(policy, labels, number)


# What is refused

REFUSED = {
    "a value that does not exist": ({"rooter": {}}, "rooter"),
    "a value in the wrong place": ({"router": {"replicaCount": 2}}, "replicaCount"),
    "a word for a number": ({"router": {"replicas": "two"}}, r"router/replicas.*got string, want integer"),
    "no such mode": ({"indexer": {"mode": "inside"}}, r"indexer/mode.*'none', 'sidecar', 'standalone'"),
    "a port too high": ({"picker": {"port": 70000}}, r"picker/port.*maximum"),
    "a setting that does not exist": ({"config": {"policy": {"nmae": "x"}}}, "nmae"),
    "a setting out of its range": ({"config": {"picker": {"read_usage": 1.5}}}, "config/picker/read_usage"),
    "a policy that does not exist": ({"config": {"policy": {"name": "kv-aware"}}}, r"policy/name.*'kv_aware'"),
    "a token in plain": ({"config": {"server": {"token": "x"}}}, "token"),
    "an index secret in plain": ({"config": {"index": {"secret": "x"}}}, "secret"),
    "a password in plain": ({"config": {"replicas": {"redis": "redis://:x@host"}}}, "redis"),
    "a worker's key in plain": ({"config": {"fleet": {"api_key": "x"}}}, "api_key"),
    "one worker's key in plain": ({"config": {"workers": [{"url": "http://w", "api_key": "x"}]}}, "api_key"),
    "keys in plain": ({"config": {"tenants": {"named": {}}}}, "named"),
    "a name of a worker": ({"workers": {"Upper": {"model": "m"}}}, "Upper"),
    "an unknown engine": ({"workers": {"a": {"engine": "llama.cpp", "model": "m"}}}, "workers/a/engine"),
    "a digest that is none": ({"image": {"digest": "sha256:1"}}, "image/digest"),
    "a worker without a model": ({"workers": {"a": {}}}, r"workers\.a\.model: name the model"),
    "more ranks than ports": ({"workers": {"a": {"model": "m", "dataParallelSize": 200}}}, "want more ports"),
    "tenants without a token": (
        {"secrets": {"tenants": {"name": "t"}, "adminToken": {"create": False}}},
        "set secrets.adminToken too",
    ),
    "a pool without a picker": ({"inferencePool": {"enabled": True}}, "wants picker.enabled"),
    "a route to nothing": (
        {"httpRoute": {"enabled": True, "backend": "envoy", "parentRefs": [{"name": "g"}]}},
        "envoy is not enabled",
    ),
    "a route without a gateway": ({"httpRoute": {"enabled": True}}, "name the gateway"),
    "nothing at all": ({"router": {"enabled": False}}, "nothing to install"),
    "a sidecar of nothing": (
        {"router": {"enabled": False}, "picker": {"enabled": True}, "indexer": {"mode": "sidecar"}},
        "sidecar wants router.enabled",
    ),
    "a service without a name": ({"discovery": {"mode": "service"}}, "name the service"),
    "a scaling by nothing": ({"workers": {"a": {"model": "m", "autoscaling": {"enabled": True}}}}, "what to scale by"),
    "roles without pods": (
        {"discovery": {"mode": "service"}, "workers": {"a": {"model": "m", "role": "decode"}}},
        "do not tell roles",
    ),
    "simulated disaggregation": ({"workers": {"a": {"engine": "simulated", "role": "decode"}}}, "does both"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unusable_values_are_refused_by_name(values: Object, message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert re.search(message, str(refused.value).replace("\n", " ")), str(refused.value)


def leaves(schema: Object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Object]]:
    """Every value of the schema that holds no others, and every map that takes none but its own."""
    for name, each in schema.get("properties", {}).items():
        yield (*place, name), each
        yield from leaves(each, (*place, name))


def nested(place: tuple[str, ...], value: Any) -> Object:
    return nested(place[:-1], {place[-1]: value}) if place else value


def refusal(values: Object) -> str:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmValuesError) as refused:
        chart.validate_schema(values)
    return str(refused.value)


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# Those of `config` are in a definition, those of pods and the like in another's place.
LEAVES = [*leaves(SCHEMA), *leaves({"properties": {"config": SCHEMA["$defs"]["Settings"]}})]
TYPED = [(place, each) for place, each in LEAVES if isinstance(each.get("type"), str | list)]
CLOSED = [place for place, each in LEAVES if each.get("additionalProperties") is False]


def test_schema_refuses_wrong_types() -> None:
    assert len(TYPED) > 200
    for place, each in TYPED:
        kinds = {each["type"]} if isinstance(each["type"], str) else set(each["type"])
        wrong: Any = "wrong" if kinds & {"object", "array"} else {"wrong": 1}
        assert f"/{'/'.join(place)}" in refusal(nested(place, wrong)), place


def test_schema_refuses_unknown_keys() -> None:
    assert len(CLOSED) > 30
    for place in CLOSED:
        message = refusal(nested(place, {"mispelt": 1}))
        assert f"/{'/'.join(place)}" in message
        assert "mispelt" in message


# Notes, pods and packages


def test_notes_name_the_urls_and_missing_parts() -> None:
    text = notes({})
    assert "http://rel-kvrouter-router.inference.svc:80/v1" in text
    assert "there are no workers" in text
    assert "get secret rel-kvrouter-token" in text
    assert "without secrets.adminToken" in notes({"secrets": {"adminToken": {"create": False}}})
    assert "there are no workers" not in notes(profile("demo"))
    assert "rel-kvrouter-envoy" in notes(profile("envoy"))
    assert "InferencePool rel-kvrouter" in notes(profile("gateway"))
    assert "networkPolicy.workerClients" not in notes(profile("gateway"))
    assert "networkPolicy.workerClients" in notes(profile("gateway") | {"networkPolicy": {"workerClients": []}})


def test_component_pod_values_override_pod_defaults() -> None:
    values = {
        "podDefaults": {"nodeSelector": {"a": "1", "b": "1"}, "tolerations": [{"key": "x"}], "labels": {"c": "1"}},
        "router": {"pod": {"nodeSelector": {"b": "2"}, "tolerations": []}},
        "redis": {"enabled": True},
    }
    objects = render(values)
    router = named(objects, "Deployment", "rel-kvrouter-router")["spec"]["template"]
    redis = named(objects, "StatefulSet", "rel-kvrouter-redis")["spec"]["template"]
    assert router["spec"]["nodeSelector"] == {"a": "1", "b": "2"}
    assert "tolerations" not in router["spec"]
    assert redis["spec"]["nodeSelector"] == {"a": "1", "b": "1"}
    assert redis["spec"]["tolerations"] == [{"key": "x"}]
    assert router["metadata"]["labels"]["c"] == redis["metadata"]["labels"]["c"] == "1"


def test_extra_objects_are_rendered_as_templates() -> None:
    names = {found["metadata"]["name"] for found in of_kind(release("secure"), "ConfigMap")}
    assert {"rel-extra", "rel-text"} <= names


def test_monitoring_renders_each_dashboard_and_all_alerts() -> None:
    monitoring = {"prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}}
    objects = render({"monitoring": monitoring})
    rendered = named(objects, "ConfigMap", "rel-kvrouter-dashboards")["data"]
    assert rendered.keys() == {"router.json", "index.json", "engines.json"}
    for name, text in rendered.items():
        assert json.loads(text) == json.loads((CHART / "dashboards" / name).read_text())
    [rules] = of_kind(objects, "PrometheusRule")
    shipped = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert [group["name"] for group in rules["spec"]["groups"]] == [group["name"] for group in shipped]


def test_chart_package_contains_its_files(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as chart:
        files = {found["name"] for found in chart.files}
    assert {"README.md", "files/alerts.yaml"} <= files
    assert {f"dashboards/{path.name}" for path in (CHART / "dashboards").iterdir()} <= files
    assert not any(name.startswith("ci/") for name in files)


KEDA = {"enabled": True, "serverAddress": "http://prometheus:9090"}


def test_keda_scales_a_model_to_zero_on_demand() -> None:
    worker = {"engine": "simulated", "servedModelName": "m", "keda": KEDA | {"authenticationRef": "prometheus"}}
    objects = render({"workers": {"a": worker, "b": worker | {"servedModelName": "n"}}})
    scaled = named(objects, "ScaledObject", "rel-kvrouter-worker-a")["spec"]
    deployment = named(objects, "Deployment", scaled["scaleTargetRef"]["name"])
    assert "replicas" not in deployment["spec"]
    assert scaled["minReplicaCount"] == 0
    trigger = scaled["triggers"][0]
    expected = 'sum(kvrouter_model_demand{namespace="inference",model="m"}) or vector(0)'
    assert trigger["metadata"]["query"] == expected
    assert trigger["authenticationRef"] == {"name": "prometheus"}
    settings = yaml.safe_load(named(objects, "ConfigMap", "rel-kvrouter-config")["data"]["config.yaml"])
    assert settings["models"] == {"m": {}, "n": {}}
    assert settings["admission"]["cold_start_timeout"] == 900


def test_keda_scales_each_role_on_its_own_load() -> None:
    worker = VLLM | {"servedModelName": "m", "keda": KEDA | {"prefillSeconds": 2, "kvUsage": 0.6}}
    objects = render({"workers": {role: worker | {"role": role} for role in ("prefill", "decode")}})
    triggers = {
        role: named(objects, "ScaledObject", f"rel-kvrouter-worker-{role}")["spec"]["triggers"]
        for role in ("prefill", "decode")
    }
    demand = 'sum(kvrouter_model_demand{namespace="inference",model="m"}) or vector(0)'
    queries = {role: [each["metadata"]["query"] for each in triggers[role]] for role in triggers}
    labels = 'namespace="inference",model="m"'
    assert queries["prefill"] == [
        f"clamp_max({demand}, 1)",
        f'sum(avg_over_time(kvrouter_role_prefill_seconds{{{labels},role="prefill"}}[1m])) or vector(0)',
    ]
    assert queries["decode"] == [
        demand,
        f'max(avg_over_time(kvrouter_role_kv_usage_ratio{{{labels},role="decode"}}[1m])) or vector(0)',
    ]
    assert [triggers[role][1]["metadata"]["threshold"] for role in triggers] == ["2", "0.6"]
    assert {triggers[role][1]["metricType"] for role in triggers} == {"Value"}


def test_model_cache_claim_outlives_the_release() -> None:
    cache = {"enabled": True, "size": "1Ti", "storageClass": "fast"}
    objects = render({"workers": {"a": VLLM | {"modelCache": cache}}})
    claim = named(objects, "PersistentVolumeClaim", "rel-kvrouter-worker-a-models")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"
    pod = named(objects, "Deployment", "rel-kvrouter-worker-a")["spec"]["template"]["spec"]
    home = next(volume for volume in pod["volumes"] if volume["name"] == "home")
    assert home["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    objects = render({"workers": {"a": VLLM | {"modelCache": cache | {"existingClaim": "mine"}}}})
    assert not of_kind(objects, "PersistentVolumeClaim")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "simulated"])
def test_adapters_are_arguments_of_the_engine(engine: str) -> None:
    lora = {"enabled": True, "adapters": {"poet": "/adapters/poet"}}
    ran = container(render({"workers": {"a": {"engine": engine, "model": "m", "lora": lora}}}), "rel-kvrouter-worker-a")
    arguments = ran.get("command") or ran["args"]
    assert ("--adapter=poet" if engine == "simulated" else "poet=/adapters/poet") in arguments
    if engine != "simulated":
        assert "--enable-lora" in arguments
    assert any(each["name"] == "VLLM_ALLOW_RUNTIME_LORA_UPDATING" for each in ran["env"]) is (engine == "vllm")


PREFILL = {"workers": {"a": VLLM | {"role": "prefill"}}, "secrets": {"adminToken": {"create": False}}}


def test_release_of_prefill_workers_alone_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="add one with role: decode"):
        render(PREFILL)


@pytest.mark.parametrize(
    "later",
    [
        {"discovery": {"selector": "app=vllm"}},
        {"config": {"workers": [{"url": "http://decode:8000"}]}},
        {"secrets": {"adminToken": {"create": True}}},
    ],
)
def test_decode_workers_may_come_later(later: Object) -> None:
    assert render(PREFILL | later)


@pytest.mark.parametrize(
    ("worker", "word"),
    [
        ({"keda": {"enabled": True}}, "serverAddress"),
        ({"keda": KEDA, "autoscaling": {"enabled": True, "metrics": [{}]}}, "enable one of them"),
        ({"keda": KEDA | {"minReplicas": 5}}, "more than maxReplicas"),
        ({"lora": {"adapters": {"a": "b"}}}, "lora.enabled"),
        ({"nodes": 3}, "4 ranks do not divide evenly among 3 nodes"),
        ({"nodes": 2, "engine": "sglang"}, "where the router does not read"),
        ({"nodes": 2, "engine": "simulated"}, "runs on one node"),
        ({"kvOffload": {"size": 1}, "engine": "simulated"}, "vLLM and SGLang only"),
    ],
)
def test_conflicting_worker_values_are_refused(worker: Object, word: str) -> None:
    with pytest.raises(helm_python.HelmError, match=word):
        render({"workers": {"a": VLLM | worker}})
