"""Schemas of the custom resources that the chart uses, with the fields that the chart uses.

Nothing else is allowed, so a field that is misspelt or in the wrong place is found.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_HOST = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_LABELS = {
    "type": "object",
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _array(items: Schema, least: int = 0, most: int = 64) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _kind(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(
        ["name"], name=_HOST, namespace={"type": "string", "maxLength": 63}, labels=_LABELS, annotations=_STRINGS
    )
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_REFERENCE = {
    "group": {"type": "string"},
    "kind": {"type": "string"},
    "name": _HOST,
    "namespace": {"type": "string", "minLength": 1, "maxLength": 63},
    "port": _PORT,
}

_HTTP_ROUTE = _object(
    [],
    parentRefs=_array(_object(["name"], sectionName={"type": "string"}, **_REFERENCE), most=32),
    hostnames=_array(_HOST, most=16),
    rules=_array(
        _object(
            [],
            matches=_array(
                _object(
                    [],
                    path=_object(
                        [],
                        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value={"type": "string", "pattern": "^/"},
                    ),
                )
            ),
            timeouts=_object([], request=_DURATION, backendRequest=_DURATION),
            backendRefs=_array(_object(["name"], weight={"type": "integer"}, **_REFERENCE), most=16),
        ),
        least=1,
        most=16,
    ),
)

_INFERENCE_POOL = _object(
    ["selector", "targetPorts"],
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    selector=_object(["matchLabels"], matchLabels=_LABELS | {"minProperties": 1, "maxProperties": 64}),
    targetPorts=_array(_object(["number"], number=_PORT), least=1, most=8),
    endpointPickerRef=_object(
        ["name", "port"],
        group={"type": "string"},
        kind={"const": "Service"},
        name=_HOST,
        port=_object(["number"], number=_PORT),
        failureMode={"enum": ["FailClose", "FailOpen"]},
    ),
)

_SERVICE_MONITOR = _object(
    ["selector", "endpoints"],
    selector=_object([], matchLabels=_STRINGS),
    namespaceSelector=_object([], matchNames=_array({"type": "string"})),
    endpoints=_array(
        _object(
            [],
            port={"type": "string"},
            path={"type": "string"},
            interval={"type": "string", "pattern": r"^(([0-9]+)(ms|s|m|h))+$"},
            scheme={"enum": ["http", "https"]},
            tlsConfig=_object([], insecureSkipVerify={"type": "boolean"}),
        ),
        least=1,
    ),
)

_RULE = _object(
    ["expr"],
    alert={"type": "string", "minLength": 1},
    record={"type": "string", "minLength": 1},
    expr={"type": ["string", "integer"]},
    labels=_STRINGS,
    annotations=_STRINGS,
    **{"for": {"type": "string", "pattern": r"^(0|([0-9]+(y|w|d|h|m|s|ms))+)$"}},
)

_PROMETHEUS_RULE = _object(
    [], groups=_array(_object(["name"], name={"type": "string", "minLength": 1}, rules=_array(_RULE)))
)

# keda.sh/v1alpha1, of KEDA 2.17. Metadata of a trigger are texts.
_SCALED_OBJECT = _object(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=_object(["name"], apiVersion={"type": "string"}, kind={"type": "string"}, name=_HOST),
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    pollingInterval={"type": "integer", "minimum": 1},
    cooldownPeriod={"type": "integer", "minimum": 0},
    advanced=_object([], horizontalPodAutoscalerConfig=_object([], behavior={"type": "object"})),
    triggers=_array(
        _object(
            ["type", "metadata"],
            type={"type": "string"},
            metadata=_STRINGS,
            authenticationRef=_object(["name"], name=_HOST),
        ),
        least=1,
    ),
)

# The pods of a group are checked as pods: `chart.pod_templates` finds them.
_TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}

_LEADER_WORKER_SET = _object(
    ["leaderWorkerTemplate"],
    replicas={"type": "integer", "minimum": 0},
    rolloutStrategy=_object(
        ["type"],
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_object(
            [],
            maxSurge={"type": ["integer", "string"]},
            maxUnavailable={"type": ["integer", "string"]},
            partition={"type": "integer"},
        ),
    ),
    leaderWorkerTemplate=_object(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate=_TEMPLATE,
        workerTemplate=_TEMPLATE,
    ),
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_object(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
)

SCHEMAS: dict[str, Schema] = {
    "LeaderWorkerSet": _kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET),
    "ScaledObject": _kind("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
    "HTTPRoute": _kind("gateway.networking.k8s.io/v1", "HTTPRoute", _HTTP_ROUTE),
    "InferencePool": _kind("inference.networking.k8s.io/v1", "InferencePool", _INFERENCE_POOL),
    "ServiceMonitor": _kind("monitoring.coreos.com/v1", "ServiceMonitor", _SERVICE_MONITOR),
    "PrometheusRule": _kind("monitoring.coreos.com/v1", "PrometheusRule", _PROMETHEUS_RULE),
}
