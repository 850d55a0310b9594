{{/* The engines' command lines: dict of root, worker and name. */}}

{{- define "kvrouter.publisher" -}}
{{- $events := .root.Values.events -}}
{{- $config := dict "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int $events.port)) "replay_endpoint" (printf "tcp://*:%d" (int $events.replayPort)) "topic" $events.topic "buffer_steps" (int $events.bufferSteps) -}}
{{- if eq .worker.engine "vllm" -}}
{{- $config = merge $config (dict "enable_kv_cache_events" true) -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* The configuration of vLLM's KV connectors, as JSON; empty without any. */}}
{{/* The port of rank 0's tier that other workers of vLLM pull from; empty unless config.pulls.protocol is p2p. */}}
{{- define "kvrouter.pullPort" -}}
{{- $pulls := .root.Values.config.pulls | default dict -}}
{{- if and (eq (toString $pulls.protocol) "p2p") (eq .worker.engine "vllm") .worker.kvOffload.size -}}
{{- $pulls.port | default 5710 -}}
{{- end -}}
{{- end -}}

{{- define "kvrouter.vllmConnectors" -}}
{{- $w := .worker -}}
{{- $all := list -}}
{{- if ne $w.role "encode" -}}
{{- if ne $w.role "both" -}}
{{- $all = append $all (dict "kv_connector" $w.disaggregation.connector "kv_role" "kv_both") -}}
{{- end -}}
{{- if .root.Values.pool.address -}}
{{- $all = append $all (dict "kv_connector" "MooncakeStoreConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute") -}}
{{- end -}}
{{- $secondary := ternary (list (dict "type" "p2p")) list (ne (include "kvrouter.pullPort" .) "") -}}
{{- with int $w.kvOffload.size -}}
{{- $tier := dict "spec_name" "TieringOffloadingSpec" "cpu_bytes_to_use" (mul . 1073741824) "offload_prompt_only" false "self_describing_kv_events" true -}}
{{- with $secondary }}{{- $_ := set $tier "secondary_tiers" . }}{{- end -}}
{{- $all = append $all (dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" $tier) -}}
{{- end -}}
{{- end -}}
{{- if eq (len $all) 1 -}}
{{- first $all | toJson -}}
{{- else if $all -}}
{{- dict "kv_connector" "MultiConnector" "kv_role" "kv_both" "kv_connector_extra_config" (dict "connectors" $all) | toJson -}}
{{- end -}}
{{- end -}}

{{- define "kvrouter.vllmCommand" -}}
{{- $w := .worker -}}
{{- $nodes := int $w.nodes -}}
{{- $ranks := int $w.dataParallelSize -}}
command:
  {{- if and (gt $nodes 1) (gt $ranks 1) }}
  # The first of this node's ranks follows from the node's number.
  - /bin/sh
  - -c
  - exec "$@" --data-parallel-start-rank=$((LWS_WORKER_INDEX * {{ div $ranks $nodes }}))
  - sh
  {{- end }}
  - vllm
  - serve
  - {{ $w.model | quote }}
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  {{- with $w.servedModelName }}
  - --served-model-name={{ . }}
  {{- end }}
  {{- if eq $w.role "encode" }}
  - --mm-encoder-only
  - --no-enable-prefix-caching
  - --enforce-eager
  {{- else }}
  - --enable-prefix-caching
  - --enable-prompt-tokens-details
  {{- end }}
  - --tensor-parallel-size={{ $w.tensorParallelSize }}
  - --data-parallel-size={{ $w.dataParallelSize }}
  {{- if and (gt $nodes 1) (gt $ranks 1) }}
  - --data-parallel-size-local={{ div $ranks $nodes }}
  - --data-parallel-address=$(LWS_LEADER_ADDRESS)
  - --data-parallel-rpc-port=13345
  - --data-parallel-hybrid-lb
  {{- else if gt $nodes 1 }}
  - --distributed-executor-backend=mp
  - --nnodes={{ $nodes }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --master-addr=$(LWS_LEADER_ADDRESS)
  {{- if eq .part "node" }}
  - --headless
  {{- end }}
  {{- end }}
  {{- if $w.expertParallel }}
  - --enable-expert-parallel
  {{- end }}
  {{- with $w.blockSize }}
  - --block-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --max-model-len={{ int . }}
  {{- end }}
  {{- with $w.gpuMemoryUtilization }}
  - --gpu-memory-utilization={{ . }}
  {{- end }}
  {{- if $w.lora.enabled }}
  - --enable-lora
  - --max-loras={{ $w.lora.maxLoras }}
  - --max-lora-rank={{ $w.lora.maxRank }}
  {{- with $w.lora.adapters }}
  - --lora-modules
  {{- range $name, $path := . }}
  - {{ printf "%s=%s" $name $path | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if ne $w.role "encode" }}
  - {{ printf "--kv-events-config=%s" (include "kvrouter.publisher" .) | quote }}
  {{- end }}
  {{- if and $w.ecTransfer (ne $w.role "decode") }}
  - {{ printf "--ec-transfer-config=%s" (merge (dict "ec_role" (ternary "ec_producer" "ec_consumer" (eq $w.role "encode"))) $w.ecTransfer | toJson) | quote }}
  {{- end }}
  {{- with include "kvrouter.vllmConnectors" . }}
  - {{ printf "--kv-transfer-config=%s" . | quote }}
  {{- end }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "kvrouter.sglangCommand" -}}
{{- $w := .worker -}}
command:
  - python3
  - -m
  - sglang.launch_server
  - --model-path={{ $w.model }}
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  {{- with $w.servedModelName }}
  - --served-model-name={{ . }}
  {{- end }}
  {{- if .root.Values.secrets.workerApiKey.name }}
  - --api-key=$(WORKER_API_KEY)
  {{- end }}
  - --enable-cache-report
  - --enable-metrics
  - --tp-size={{ $w.tensorParallelSize }}
  - --{{ ternary "attn-dp-size" "dp-size" $w.dataParallelAttention }}={{ $w.dataParallelSize }}
  {{- if gt (int $w.nodes) 1 }}
  - --nnodes={{ $w.nodes }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
  {{- end }}
  {{- if $w.expertParallel }}
  - --ep-size={{ $w.tensorParallelSize }}
  {{- end }}
  {{- if or (int $w.kvOffload.size) .root.Values.pool.address }}
  - --enable-hierarchical-cache
  {{- with int $w.kvOffload.size }}
  - --hicache-size={{ . }}
  {{- end }}
  {{- if .root.Values.pool.address }}
  - --hicache-storage-backend=mooncake
  {{- end }}
  {{- end }}
  {{- with $w.blockSize }}
  - --page-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --context-length={{ int . }}
  {{- end }}
  {{- with $w.gpuMemoryUtilization }}
  - --mem-fraction-static={{ . }}
  {{- end }}
  {{- if $w.lora.enabled }}
  - --enable-lora
  - --max-loras-per-batch={{ $w.lora.maxLoras }}
  - --max-lora-rank={{ $w.lora.maxRank }}
  {{- /* Without adapters at the start it wants to be told which modules later ones have. */}}
  - --lora-target-modules=all
  {{- with $w.lora.adapters }}
  - --lora-paths
  {{- range $name, $path := . }}
  - {{ printf "%s=%s" $name $path | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if eq $w.role "encode" }}
  - --encoder-only
  {{- else }}
  - {{ printf "--kv-events-config=%s" (include "kvrouter.publisher" .) | quote }}
  {{- end }}
  {{- if has $w.role (list "prefill" "decode") }}
  - --disaggregation-mode={{ $w.role }}
  - --disaggregation-bootstrap-port={{ $w.disaggregation.port }}
  - --disaggregation-transfer-backend={{ $w.disaggregation.transferBackend }}
  {{- end }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "kvrouter.simulatedCommand" -}}
{{- $w := .worker -}}
args:
  - simulate
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  - --model={{ $w.servedModelName | default $w.model | default "simulated" }}
  - --dp-size={{ $w.dataParallelSize }}
  {{- if .root.Values.secrets.workerApiKey.name }}
  - --api-key=$(WORKER_API_KEY)
  {{- end }}
  {{- with $w.blockSize }}
  - --block-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --max-model-len={{ int . }}
  {{- end }}
  {{- range $name, $path := $w.lora.adapters }}
  - --adapter={{ $name }}
  {{- end }}
  - {{ printf "--kv-events=%s" (include "kvrouter.publisher" .) | quote }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}
