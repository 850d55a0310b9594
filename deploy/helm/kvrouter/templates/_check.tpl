{{/* What a schema cannot say of the values. */}}
{{- define "kvrouter.check" -}}
{{- $v := .Values -}}
{{- if and $v.secrets.tenants.name (not (include "kvrouter.adminTokenSecret" .)) -}}
{{- fail "secrets.tenants: set secrets.adminToken too, or else anyone may ask what tenants hold" -}}
{{- end -}}
{{- if not (or $v.router.enabled $v.picker.enabled $v.envoy.enabled (eq $v.indexer.mode "standalone")) -}}
{{- fail "nothing to install: enable router, envoy or picker" -}}
{{- end -}}
{{- if and $v.pool.address (not (and $v.pool.http $v.pool.events)) -}}
{{- fail "pool.http, pool.events: name them too, so that the router knows what the pool holds" -}}
{{- end -}}
{{- if and (eq $v.indexer.mode "sidecar") (not $v.router.enabled) -}}
{{- fail "indexer.mode: sidecar wants router.enabled" -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.picker.enabled) -}}
{{- fail "inferencePool.enabled: wants picker.enabled" -}}
{{- end -}}
{{- range list "ingress" "httpRoute" -}}
{{- $route := index $v . -}}
{{- if and $route.enabled (eq $route.backend "inferencePool") (not $v.inferencePool.enabled) -}}
{{- fail (printf "%s.backend: inferencePool wants inferencePool.enabled" .) -}}
{{- end -}}
{{- if and $route.enabled (has $route.backend (list "router" "envoy")) (not (index $v $route.backend).enabled) -}}
{{- fail (printf "%s.backend: %s is not enabled" . $route.backend) -}}
{{- end -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the gateway" -}}
{{- end -}}
{{- if and (eq $v.discovery.mode "service") (not $v.discovery.service) (not $v.workers) -}}
{{- fail "discovery.service: name the service of the workers" -}}
{{- end -}}
{{- /* A selector, a service or a token may bring decode workers that this release does not have. */}}
{{- $others := or $v.discovery.selector $v.discovery.service $v.config.workers (include "kvrouter.adminTokenSecret" .) -}}
{{- $roles := list -}}
{{- range $v.workers -}}
{{- $roles = append $roles (mergeOverwrite (deepCopy $v.workerDefaults) (deepCopy .)).role -}}
{{- end -}}
{{- if and $roles (not (has "both" $roles)) (not (has "decode" $roles)) (not $others) -}}
{{- fail "workers: all of them are prefill or encode workers, so no worker decodes an answer: add one with role: decode" -}}
{{- end -}}
{{- range $name, $given := $v.workers -}}
{{- $worker := mergeOverwrite (deepCopy $v.workerDefaults) (deepCopy $given) -}}
{{- if and (ne $worker.engine "simulated") (not $worker.model) -}}
{{- fail (printf "workers.%s.model: name the model" $name) -}}
{{- end -}}
{{- if gt (int $worker.dataParallelSize) (int (sub (int $v.events.replayPort) (int $v.events.port) | toString | trimPrefix "-" | int)) -}}
{{- fail (printf "workers.%s.dataParallelSize: %d ranks want more ports than there are between events.port and events.replayPort" $name (int $worker.dataParallelSize)) -}}
{{- end -}}
{{- if gt (int $worker.nodes) 1 -}}
{{- if eq $worker.engine "simulated" -}}
{{- fail (printf "workers.%s.nodes: a simulated worker runs on one node" $name) -}}
{{- end -}}
{{- if and (eq $worker.engine "sglang") (gt (int $worker.dataParallelSize) 1) -}}
{{- fail (printf "workers.%s.nodes: SGLang's ranks on other nodes publish events where the router does not read; set dataParallelSize: 1, or engine: vllm" $name) -}}
{{- end -}}
{{- if and (gt (int $worker.dataParallelSize) 1) (mod (int $worker.dataParallelSize) (int $worker.nodes)) -}}
{{- fail (printf "workers.%s.dataParallelSize: %d ranks do not divide evenly among %d nodes" $name (int $worker.dataParallelSize) (int $worker.nodes)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $worker.engine "simulated") (int $worker.kvOffload.size) -}}
{{- fail (printf "workers.%s.kvOffload: for vLLM and SGLang only" $name) -}}
{{- end -}}
{{- if and $worker.autoscaling.enabled (not $worker.autoscaling.metrics) -}}
{{- fail (printf "workers.%s.autoscaling.metrics: say what to scale by" $name) -}}
{{- end -}}
{{- if and $worker.keda.enabled $worker.autoscaling.enabled -}}
{{- fail (printf "workers.%s.keda: it scales instead of autoscaling; enable one of them" $name) -}}
{{- end -}}
{{- if and $worker.keda.enabled (not $worker.keda.serverAddress) -}}
{{- fail (printf "workers.%s.keda.serverAddress: say where Prometheus answers" $name) -}}
{{- end -}}
{{- if and $worker.keda.enabled (not $v.router.enabled) -}}
{{- fail (printf "workers.%s.keda: wants router.enabled, where requests wait" $name) -}}
{{- end -}}
{{- if and $worker.keda.enabled (gt (int $worker.keda.minReplicas) (int $worker.keda.maxReplicas)) -}}
{{- fail (printf "workers.%s.keda.minReplicas: more than maxReplicas" $name) -}}
{{- end -}}
{{- if and $worker.lora.adapters (not $worker.lora.enabled) -}}
{{- fail (printf "workers.%s.lora.adapters: wants lora.enabled" $name) -}}
{{- end -}}
{{- if and (eq $v.discovery.mode "service") (ne $worker.role "both") -}}
{{- fail (printf "workers.%s.role: endpoints of a service do not tell roles; set discovery.mode: pods" $name) -}}
{{- end -}}
{{- if and (eq $worker.engine "vllm") (eq $worker.role "encode") (not $worker.ecTransfer) -}}
{{- fail (printf "workers.%s.ecTransfer: name the connector that moves encoded media, such as {ec_connector: ECCPUConnector}" $name) -}}
{{- end -}}
{{- if and (eq $worker.engine "simulated") (ne $worker.role "both") -}}
{{- fail (printf "workers.%s.role: a simulated worker does both" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
